"""Draft the parallel plan of a model: `tp` from its data flow, `pp` from the order in which its
modules run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_3d.compat.torch import real_values
from lightning_3d.compat.transformers import is_transposed_linear, linear_sizes
from lightning_3d.engine.plan_draft.data_flow import DataFlow
from lightning_3d.engine.plan_draft.find_model import find_blocks, find_model
from lightning_3d.engine.plan_draft.inputs import Inputs, example_inputs
from lightning_3d.engine.plan_draft.pipeline_order import PipelineOrder, find_order
from lightning_3d.engine.plan_draft.regions import Region, described, find_regions
from lightning_3d.engine.self_check.explain import first_line
from lightning_3d.engine.self_check.local_sizes import LocalSizes
from lightning_3d.engine.self_check.model_copy import (
    copy_without_values,
    fill,
    kinds_of,
    leave_out_blocks,
)
from lightning_3d.engine.self_check.noise import WithoutNoise
from lightning_3d.errors import PlanError, listed
from lightning_3d.layout.layout import Layout
from lightning_3d.models.parallel_plan import Cut, ParallelPlan
from lightning_3d.parallel.trials.products import returns_features
from lightning_3d.parallel.undone import undone


@dataclass(frozen=True)
class Draft:
    """A parallel plan of a model, as `Lightning3DStrategy(plan=...)` takes it, and what is missing
    from it.

    Attributes:
        name: name of the model in the user's module.
        model: name of its class.
        plan: the plan; a part that cannot be derived is absent.
        tp: degree for which the shards were tried; 1 if none were.
        problems: axis ("tp", "pp") -> what cannot be derived, and why.
        notes: what the plan leaves whole without harm.
        inputs: inputs with which the model ran.
        local_sizes: attributes of the model that differ on one of the `tp` ranks.
    """

    name: str
    model: str
    plan: dict[str, Any]
    tp: int
    problems: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    inputs: Inputs = field(default_factory=Inputs, repr=False)
    local_sizes: LocalSizes = field(default_factory=dict)

    def require(self, layout: Layout, axes: Iterable[str], *, partly: bool) -> None:
        """Refuse a plan that does not have everything that a layout needs along these axes ("tp",
        "pp").

        Args:
            partly: whether some layers of the blocks may stay whole with tp.

        Raises:
            PlanError: something cannot be derived.
        """
        enough = {"tp"} & self.plan.keys() if partly else set()
        failed = [axis for axis in axes if self.problems.get(axis) and axis not in enough]
        if not failed:
            return
        found = " ".join(
            f"{axis}: {problem}." for axis in failed for problem in self.problems[axis]
        )
        without = math.prod(getattr(layout, axis) for axis in failed)
        degrees: Any = dict.fromkeys([*failed, *(["vp"] if "pp" in failed else [])], 1)
        fitting = replace(layout, dp=layout.dp * without, **degrees)
        raise PlanError(
            f"{self.model} declares no plan for {' and '.join(failed)}, and none can be derived."
            f" {found} Change the model, write the plan yourself (docs/your_model.md), or use"
            f" {fitting}, for example with zero_stage=3, which needs no plan."
        )


def draft_plan(root: nn.Module, tp: int = 2, *, name: str | None = None) -> Draft:
    """Draft the plan of the model in a module.

    Runs one block of each kind in float32 on the CPU, with random weights and a few random tokens.
    Communicates nothing, changes nothing.

    Args:
        root: the user's module, with values or on the meta device.
        tp: number of ranks for which the shards are tried.
        name: name of the model in `root`; None to find it.

    Raises:
        PlanError: no list of blocks, or the model does not run with any of the inputs that were
            tried.
    """
    name, model = find_model(root, name)
    layers = find_blocks(model)
    kinds = kinds_of(list(model.get_submodule(layers).children()))
    with real_values(), torch.device("cpu"), _undisturbed(root):
        copied, kept, inputs = _runnable(root, model, layers, kinds)
        try:
            order = find_order(copied, layers, kept, inputs)
            regions, problems, notes = (
                _tensor_part(copied, layers, kinds, inputs, tp) if tp > 1 else ([], [], [])
            )
        except Exception as error:
            # of the user's code, which cannot run with random layers or be differentiated
            raise PlanError(
                f"The plan of {type(model).__name__} cannot be derived ({_named(error)})."
            ) from error
    plan: dict[str, Any] = {}
    if entries := _entries(model, layers, kinds, regions):
        whole = {
            owner: "replicate"
            for key in order.loose
            if (owner := key.rpartition(".")[0]) and _is_table(model, owner)
        }
        plan["tp"] = entries | whole
    if not order.problems:
        plan["pp"] = _pipeline_part(order, layers)
    sizes = {
        name: value
        for region in regions
        for name, value in _in_all_blocks(region.sizes, layers, kinds).items()
    }
    return Draft(
        name,
        type(model).__name__,
        plan,
        tp,
        {"tp": tuple(problems), "pp": order.problems},
        tuple(notes),
        inputs,
        sizes,
    )


def parameters_to_run(root: nn.Module, *, name: str | None = None) -> int:
    """Return the number of parameters that a draft runs on the CPU: those of one block of each
    kind, and of what is around the blocks.

    Raises:
        PlanError: no list of blocks.
    """
    _, model = find_model(root, name)
    blocks = list(model.get_submodule(find_blocks(model)).children())
    kept = {kind[0] for kind in kinds_of(blocks)}
    left_out = {
        id(parameter)
        for index, block in enumerate(blocks)
        if index not in kept
        for parameter in block.parameters()
    }
    return sum(
        parameter.numel() for parameter in model.parameters() if id(parameter) not in left_out
    )


def _named(error: Exception | None) -> str:
    return f"{type(error).__name__}: {first_line(error)}" if error is not None else "no input"


@contextmanager
def _undisturbed(root: nn.Module) -> Iterator[None]:
    with (
        undone(root),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        WithoutNoise(),
    ):
        yield


def _runnable(
    root: nn.Module, model: nn.Module, layers: str, kinds: list[tuple[int, ...]]
) -> tuple[nn.Module, list[int], Inputs]:
    """Copy a model, with values and if possible with one block of each kind, and find inputs with
    which it runs.

    Returns:
        The copy, indices of the blocks that run, and the inputs.
    """
    error: Exception | None = None
    for inputs in example_inputs(root, model):
        for kept in ([kind[0] for kind in kinds], list(range(sum(map(len, kinds))))):
            copied = copy_without_values(model)
            try:
                leave_out_blocks(copied, ParallelPlan({}, layers), kept, {})
                fill(copied, {}, 0, torch.device("cpu"))
                inputs.run(copied)
            except Exception as failed:
                error = failed
                continue
            return copied, kept, inputs
    raise PlanError(
        f"{type(model).__name__} does not run with random token ids or features ({_named(error)})."
        " Give the module an example_input_array, as Lightning defines it: inputs of the model,"
        " with at least 2 rows."
    )


def _tensor_part(
    model: nn.Module, layers: str, kinds: list[tuple[int, ...]], inputs: Inputs, tp: int
) -> tuple[list[Region], list[str], list[str]]:
    """Find the regions of one block of each kind, reasons why blocks cannot be sharded, and layers
    that stay whole without harm."""
    blocks = tuple(f"{layers}.{kind[0]}." for kind in kinds)
    linears = [
        name
        for name, child in model.named_modules()
        if name.startswith(blocks)
        and linear_sizes(child)
        and (is_transposed_linear(child) or returns_features(child))
    ]
    flow = DataFlow(model, linears, inputs)
    regions = find_regions(model, flow, layers, inputs, tp)
    problems = [described(region) for region in regions if region.problem]
    good = [region for region in regions if region.cuts]
    named = {name for region in regions for name in (*region.columns, *region.rows)}
    idle = [name for name in linears if name not in flow.order]
    if idle:
        times = sorted({flow.calls[name] for name in idle})
        problems.append(
            f"{listed(map(repr, idle[:4]))} must run once in a forward, but ran"
            f" {listed(times, last='or')} times"
        )
    others = _other_matrices(model, blocks)
    if others:
        problems.append(
            f"{listed(others[:4])} cannot be sharded: plans shard nn.Linear layers. Replace them by"
            " nn.Linear"
        )
    if not good and not problems:
        problems.append(
            f"no two linear layers in the blocks '{layers}' follow each other without a residual"
            " connection between them"
        )
    notes = [
        f"'{name}' stays whole on every rank"
        for name in linears
        if name not in named and name not in idle
    ]
    return good, problems, notes


def _other_matrices(model: nn.Module, blocks: tuple[str, ...]) -> list[str]:
    """Describe the matrices in blocks that belong to other modules than linear layers, such as
    Transformers' Conv1D."""
    return [
        f"'{name}' ({type(child).__name__})"
        for name, child in model.named_modules()
        if name.startswith(blocks)
        and not isinstance(child, nn.Embedding)
        and not linear_sizes(child)
        if any(
            parameter.ndim > 1 and min(parameter.shape) > 1
            for parameter in child.parameters(recurse=False)
        )
    ]


def _entries(
    model: nn.Module, layers: str, kinds: list[tuple[int, ...]], regions: list[Region]
) -> dict[str, Any]:
    """Write the cuts of one block of each kind as patterns for all blocks of that kind."""
    exact: dict[str, Any] = {}
    for region in regions:
        exact |= _in_all_blocks(
            {name: _short(cut) for name, cut in (region.cuts or {}).items()}, layers, kinds
        )
    return _with_patterns(model, layers, exact)


def _in_all_blocks(
    entries: Mapping[str, Any], layers: str, kinds: list[tuple[int, ...]]
) -> dict[str, Any]:
    """Repeat what belongs to one block of each kind, by name, for all blocks of that kind."""
    of_block = {kind[0]: kind for kind in kinds}
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        index, rest = re.match(r"(\d+)(.*)", name.removeprefix(f"{layers}.")).groups()  # type: ignore[union-attr]
        found |= {f"{layers}.{other}{rest}": entry for other in of_block[int(index)]}
    return found


def _with_patterns(model: nn.Module, layers: str, exact: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the index of the block by `*` where every module that matches has the same entry."""
    named = [
        *(name for name, _ in model.named_modules()),
        *(name for name, _ in model.named_parameters()),
    ]
    entries: dict[str, Any] = {}
    for name, cut in exact.items():
        pattern = f"{layers}.*.{name.removeprefix(f'{layers}.').partition('.')[2]}"
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        alike = all(exact.get(other) == cut for other in named if re.fullmatch(expression, other))
        entries[pattern if alike else name] = cut
    return entries


def _short(cut: Cut) -> Any:
    return cut.style if cut == Cut(cut.style) else cut


def _is_table(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), (nn.Embedding, nn.Linear))


def _pipeline_part(order: PipelineOrder, layers: str) -> dict[str, Any]:
    hidden = ["hidden"]
    sides = [f"side_{place + 1}" for place in order.sides]
    places = [
        f"side_{place + 1}" if place in order.sides else f"other_{place + 1}"
        for place in range(max(order.sides, default=-1) + 1)
    ]
    # What has a name of its own travels with the hidden states: see docs/your_model.md.
    entries: dict[str, Any] = {
        name: (["inputs"], [name] if name in order.carried else hidden) for name in order.before
    }
    entries[layers] = ([*hidden, *order.carried, *sides], [*hidden, *places])
    entries |= dict.fromkeys(order.after[:-1], (hidden, hidden))
    return entries | {name: (hidden, ["outputs"]) for name in order.after[-1:]}
