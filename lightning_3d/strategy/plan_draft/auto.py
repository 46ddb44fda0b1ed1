"""The draft that all ranks of a run use: rank 0 makes it and broadcasts it."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_3d.errors import Lightning3DError, NoPlanError, PlanError
from lightning_3d.layout.layout import Layout
from lightning_3d.models.parallel_plan import find_pipeline_module, read_plan
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.strategy.plan_draft.draft import Draft, draft_plan
from lightning_3d.strategy.plan_draft.inputs import Inputs
from lightning_3d.strategy.plan_draft.text import as_python


def auto_plan(root: nn.Module, mesh: Mesh, name: str | None, *, alone: bool) -> tuple[dict[str, Any] | None, str | None]:
    """Choose the plan for `plan="auto"`: the model's own if it declares all that the layout needs, else a draft, which rank 0 prints.

    Args:
        root: the user's whole module.
        name: name of the model in `root`, where the user gives it.
        alone: whether this rank has no others (a dry run).

    Returns:
        (plan, name of the model); the plan is None if the model declares it.

    Raises:
        PlanError: something that the layout needs cannot be derived; on all ranks.
    """
    if mesh.layout.tp * mesh.layout.pp == 1 or _declares_all(root, mesh.layout, name):
        return None, name
    draft = _agreed(root, mesh, name, alone=alone)
    draft.require(mesh.layout)
    if mesh.rank == 0:
        print(f'lightning_3d: plan="auto" uses this plan of {draft.model}:\n{as_python(draft)}', file=sys.stderr, flush=True)
    return draft.plan, draft.name


def with_draft(error: NoPlanError, root: nn.Module, mesh: Mesh, name: str | None, *, alone: bool) -> NoPlanError:
    """Add a draft to an error that says that a model has no plan."""
    layout = mesh.layout
    if layout.tp * layout.pp == 1:
        return error
    try:
        draft = _agreed(root, mesh, name, alone=alone)
    except Lightning3DError as reason:
        return NoPlanError(f"{error} No draft of a plan can be made: {reason}")
    if not draft.plan:
        reasons = " ".join(f"{axis}: {problem}." for axis, problems in draft.problems.items() for problem in problems)
        return NoPlanError(f"{error} No draft of a plan can be made. {reasons}")
    complete = not any(draft.problems.get(axis) for axis in ("tp", "pp") if getattr(layout, axis) > 1)
    use = f'Pass it as Lightning3DStrategy("{layout}", plan=plan), or pass plan="auto".'
    use = use if complete else f"It is incomplete; its comments say why. {where_it_works(draft, layout)}"
    return NoPlanError(f"{error} This is a draft for {draft.model}:\n\n{as_python(draft)}\n\n{use}")


def where_it_works(draft: Draft, layout: Layout) -> str:
    """Name the nearest layout for which an incomplete draft is complete; "" if none uses it."""
    degrees = {axis: getattr(layout, axis) for axis in ("tp", "pp") if axis in draft.plan and not draft.problems.get(axis)}
    if all(degree == 1 for degree in degrees.values()):
        return ""
    fitting = Layout(**degrees, dp=layout.tp * layout.pp * layout.dp // math.prod(degrees.values()))
    return f'As it is, it works in {fitting}: use Lightning3DStrategy("{fitting}", plan="auto").'


def _declares_all(root: nn.Module, layout: Layout, name: str | None) -> bool:
    try:
        plan = read_plan(find_pipeline_module(root, name)[1])
    except NoPlanError:
        return False
    return (layout.tp == 1 or not set(plan.tp) <= {plan.embedding, plan.head}) and (layout.pp == 1 or bool(plan.layers))


def _agreed(root: nn.Module, mesh: Mesh, name: str | None, *, alone: bool) -> Draft:
    """Make the draft on rank 0, and return or raise on all ranks what it makes or raises."""
    found: list[Any] = [None]
    if alone or mesh.rank == 0:
        try:
            found[0] = replace(draft_plan(root, mesh.layout.tp, name=name), inputs=Inputs())
        except Lightning3DError as error:
            found[0] = error
        except Exception as error:  # the other ranks wait for an answer
            found[0] = PlanError(f"The plan cannot be derived ({type(error).__name__}: {error}).")
    if not alone:
        dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], Exception):
        raise found[0]
    draft: Draft = found[0]
    return draft
