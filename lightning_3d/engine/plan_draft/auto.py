"""The draft that all ranks of a run use: rank 0 makes it and broadcasts it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_3d.engine.plan_draft.draft import Draft, draft_plan, parameters_to_run
from lightning_3d.engine.plan_draft.find_model import find_model
from lightning_3d.engine.plan_draft.inputs import Inputs
from lightning_3d.engine.plan_draft.text import as_python
from lightning_3d.engine.self_check.local_sizes import LocalSizes
from lightning_3d.errors import Lightning3DError, NoPlanError, PlanError
from lightning_3d.layout.layout import Layout
from lightning_3d.models.mixtures import draft_ep
from lightning_3d.models.parallel_plan import (
    ParallelPlan,
    find_pipeline_module,
    is_transformers_model,
    models_in,
    read_plan,
)
from lightning_3d.parallel.mesh import Mesh

_QUICK = 300_000_000
"""Most parameters that a draft for a message may run: about 20 s of processor time."""


@dataclass(frozen=True)
class ChosenPlan:
    """The plan that a model is assembled with.

    Attributes:
        plan: what replaces the model's own declarations; None if there is nothing to replace.
        name: name of the model in the user's module; None to find it.
        drafted: whether a part of it is a draft, which must pass the self-check.
        local_sizes: attributes of the model that differ on a rank, as the draft found them. The
            self-check finds them, too.
    """

    plan: dict[str, Any] | None
    name: str | None
    drafted: bool = False
    local_sizes: LocalSizes = field(default_factory=dict)


def choose_plan(
    root: nn.Module,
    mesh: Mesh,
    given: dict[str, Any] | str | None,
    name: str | None,
    *,
    alone: bool,
    checked: bool = True,
) -> ChosenPlan:
    """Choose the plan of a model: the user's, else the model's own, completed by a draft of what
    the layout needs, which rank 0 prints.

    Drafts for models of Transformers, and for any other with plan="auto".

    Args:
        root: the user's whole module.
        given: the user's plan, "auto", or None.
        name: name of the model in `root`, where the user gives it.
        alone: whether this rank has no others (a dry run).
        checked: whether a self-check follows, without which no draft is used.

    Raises:
        PlanError: something that the layout needs cannot be derived, or may not be used without a
            self-check; on all ranks.
    """
    if isinstance(given, dict):
        return ChosenPlan(given, name)
    model = name if given is not None else _transformers_model(root, name)
    missing = (
        _undeclared(root, mesh.layout, model) if given is not None or model is not None else []
    )
    if not missing:
        return ChosenPlan(None, name)
    draft = _completed(root, mesh, model, missing, alone=alone)
    plan = {axis: entries for axis, entries in draft.plan.items() if axis in missing}
    lacks, text = (
        f"{draft.model} declares no plan for {' and '.join(missing)}",
        as_python(replace(draft, plan=plan)),
    )
    if not checked:
        raise PlanError(
            f"{lacks}. One was derived, but it is used only after a self-check: leave out"
            f" self_check=never, or pass:\n{text}"
        )
    if mesh.rank == 0:
        print(f"lightning_3d: {lacks}; this one was derived:\n{text}", file=sys.stderr, flush=True)
    return ChosenPlan(plan, draft.name, drafted=True, local_sizes=draft.local_sizes)


def _completed(
    root: nn.Module, mesh: Mesh, name: str | None, missing: list[str], *, alone: bool
) -> Draft:
    """Make a draft of what is missing. The part for experts needs no run of the model, so each rank
    writes it by itself.

    Raises:
        PlanError: something that the layout needs cannot be derived; on all ranks.
    """
    name, model = find_model(root, name)
    experts = {"ep": draft_ep(model)} if "ep" in missing else {}
    draft = Draft(name, type(model).__name__, {}, 1, {})
    if flows := [axis for axis in missing if axis != "ep"]:
        draft = _agreed(root, mesh, name, mesh.layout.tp if "tp" in missing else 1, alone=alone)
        # Nobody changes the code of a model of Transformers so that more of it can be sharded.
        draft.require(mesh.layout, flows, partly=is_transformers_model(model))
    return replace(draft, plan=draft.plan | experts)


def with_draft(
    error: NoPlanError, root: nn.Module, mesh: Mesh, name: str | None, *, alone: bool
) -> NoPlanError:
    """Add a draft to an error that says that a model has no plan, or for a large model how to get
    one."""
    layout = mesh.layout
    if layout.tp * layout.pp == 1:
        return error
    try:
        if (count := parameters_to_run(root, name=name)) > _QUICK:
            return NoPlanError(
                f"{error} A draft of a plan would take minutes here: it runs {count / 1e9:.1f}"
                " billion parameters on the CPU. Print it with"
                f' lightning-3d draft-plan MODULE:NAME --tp {layout.tp}, or pass plan="auto".'
            )
        draft = _agreed(root, mesh, name, layout.tp, alone=alone)
    except Lightning3DError as reason:
        return NoPlanError(f"{error} No draft of a plan can be made: {reason}")
    if not draft.plan:
        reasons = " ".join(
            f"{axis}: {problem}."
            for axis, problems in draft.problems.items()
            for problem in problems
        )
        return NoPlanError(f"{error} No draft of a plan can be made. {reasons}")
    complete = not any(
        draft.problems.get(axis) for axis in ("tp", "pp") if getattr(layout, axis) > 1
    )
    use = f'Pass it as Lightning3DStrategy("{layout}", plan=plan), or pass plan="auto".'
    use = (
        use
        if complete
        else f"It is incomplete; its comments say why. {where_it_works(draft, layout)}"
    )
    return NoPlanError(f"{error} This is a draft for {draft.model}:\n\n{as_python(draft)}\n\n{use}")


def where_it_works(draft: Draft, layout: Layout) -> str:
    """Name the nearest layout for which an incomplete draft is complete; "" if none uses it."""
    degrees = {
        axis: getattr(layout, axis)
        for axis in ("tp", "pp")
        if axis in draft.plan and not draft.problems.get(axis)
    }
    if all(degree == 1 for degree in degrees.values()):
        return ""
    fitting = Layout(**degrees, dp=layout.tp * layout.pp * layout.dp // math.prod(degrees.values()))
    return f'As it is, it works in {fitting}: use Lightning3DStrategy("{fitting}", plan="auto").'


def _transformers_model(root: nn.Module, name: str | None) -> str | None:
    """Name of the model in `root` whose plan may be drafted without being asked for; None if there
    is none, or several."""
    found = models_in(root)
    if name is not None:
        return name if name in found else None
    return next(iter(found)) if len(found) == 1 else None


def _undeclared(root: nn.Module, layout: Layout, name: str | None) -> list[str]:
    """Axes that the layout uses, and for which the model declares no plan, or one that leaves out
    parameters. A plan for its embedding and head alone is none."""
    try:
        model = find_pipeline_module(root, name)[1]
        plan = read_plan(model)
    except NoPlanError:
        model, plan = root, ParallelPlan({})
    declared = {
        "tp": not set(plan.tp) <= {plan.embedding, plan.head},
        "pp": bool(plan.layers) and _is_complete(model, plan),
    }
    declared["ep"] = bool(plan.ep)
    return [axis for axis in declared if getattr(layout, axis) > 1 and not declared[axis]]


def _is_complete(model: nn.Module, plan: ParallelPlan) -> bool:
    """Return whether each parameter is in a module of the pipeline plan."""
    parts = tuple(f"{part}." for part in (*plan.before, plan.layers, *plan.after))
    return all(
        f"{name}.".startswith(parts) for name, _ in model.named_parameters(remove_duplicate=False)
    )


def _agreed(root: nn.Module, mesh: Mesh, name: str | None, tp: int, *, alone: bool) -> Draft:
    """Make the draft on rank 0, and return or raise on all ranks what it makes or raises."""
    found: list[Any] = [None]
    if alone or mesh.rank == 0:
        try:
            found[0] = replace(draft_plan(root, tp, name=name), inputs=Inputs())
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
