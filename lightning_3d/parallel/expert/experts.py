"""Assignment of experts to ranks: the table of their shards, and the rewrite of the modules, in
place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from lightning_3d.compat.peft_layers import refuse_adapted_experts
from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.compat.torch import put_values
from lightning_3d.errors import LayoutError, PlanError
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.options.experts import GROUPED_ROW_BYTES
from lightning_3d.parallel.expert.dispatch import DispatchedExperts, ExpertParallel
from lightning_3d.parallel.expert.expert_operators import register
from lightning_3d.parallel.random_streams import draws_numbers
from lightning_3d.parallel.sharding import ShardSpec, cut_along
from lightning_3d.parallel.specialize import specialize


def expert_specs(
    module: nn.Module, plan: ParallelPlan, ep_size: int, ep_index: int, tp_index: int
) -> dict[str, ShardSpec]:
    """Shards of the rank with index `ep_index` of all parameters that are sharded over
    expert-parallel ranks, by name in `module`.

    Args:
        module: the whole module, on meta or not.
        plan: `ParallelPlan.for_experts`.

    Raises:
        LayoutError: ep does not divide the number of experts.
        PlanError: the experts have adapters.
    """
    specs: dict[str, ShardSpec] = {}
    if ep_size == 1:
        return specs
    refuse_adapted_experts(module, plan.experts, "ep")
    for name, _ in module.named_modules():
        cut = plan.cut_of(name)
        if (
            cut is not None
            and cut.style == "moe_identity_expert"
            and name.rpartition(".")[0] in plan.experts
        ):
            raise PlanError(
                f"'{name}' is an expert without weights, which expert parallelism (ep) cannot"
                " assign to a rank. Use ep=1."
            )
    for name, parameter in _expert_parameters(module, plan):
        experts = _count(module, plan, name)
        # One number for each expert, or rows of a matrix: a vector of another length belongs to all
        # experts.
        rows = parameter.shape[0] if parameter.ndim > 1 or parameter.shape == (experts,) else 0
        if not rows or rows % experts:
            raise PlanError(
                f"ep cannot split '{name}' of shape {tuple(parameter.shape)}: it does not have as"
                f" many rows for each of the {experts} experts. Use ep=1."
            )
        if experts % ep_size:
            raise LayoutError(
                f"ep={ep_size} does not divide the {experts} experts of '{name}'. Use an ep that"
                f" divides {experts}."
            )
        pieces = [(ep_index * rows // ep_size, rows // ep_size)]
        spec = cut_along(name, tuple(parameter.shape), 0, pieces, tp_replicas=(tp_index,))
        specs[name] = replace(spec, expert=True)
    return specs


def shard_experts(
    module: nn.Module, plan: ParallelPlan, specs: Mapping[str, ShardSpec], context: ExpertParallel
) -> None:
    """Keep only this rank's experts in `module`, in modules that exchange tokens between ranks. No
    communication.

    Args:
        specs: of the parameters that are here.
    """
    for name, parameter in list(_expert_parameters(module, plan)):
        put_values(parameter, specs[name].cut(parameter.detach()))
    for name, child in list(module.named_modules()):
        cut = plan.cut_of(name)
        if (
            cut is None
            or cut.style != "ep_dispatch_experts"
            or next(child.parameters(), None) is None
        ):
            continue
        experts = getattr(child, "num_experts", None)
        if not isinstance(experts, int):
            raise PlanError(
                f"'{name}' has no attribute num_experts, so its experts cannot be split over ranks."
                " Add the attribute, or use ep=1."
            )
        place, draws = register(child), any(draws_numbers(module) for module in child.modules())
        attributes = {
            "expert_parallel": context,
            "experts_of_all": experts,
            "place": place,
            "draws": draws,
            "begun_in_graph": None,
        }
        specialize(child, DispatchedExperts, **attributes)
        child.num_experts = experts // context.size


def choose_products(module: nn.Module, plan: ParallelPlan) -> None:
    """Let experts multiply in a loop where grouped matrix products, the default of Transformers,
    cannot: in float64, and where a row of this rank's weights is not a multiple of 16 bytes. In
    place; call it after sharding the layers.
    """
    found = dict(module.named_modules())
    for name in plan.experts:
        experts = found.get(name)
        config = getattr(experts, "config", None)
        if experts is None or getattr(config, "_experts_implementation", "eager") == "eager":
            continue
        matrices = [parameter for parameter in experts.parameters() if parameter.ndim == 3]
        narrow = [
            matrix
            for matrix in matrices
            if any(size * matrix.element_size() % GROUPED_ROW_BYTES for size in matrix.shape[1:])
        ]
        if narrow and narrow[0].dtype != torch.float64:
            rank_zero_warn(
                "The experts run one by one instead of in grouped matrix products. These need"
                f" weights whose rows are a multiple of {GROUPED_ROW_BYTES} bytes, but on a rank"
                f" these experts have weights of shape {list(narrow[0].shape)}. For wider rows, use"
                " a smaller tp, or ep instead of tp."
            )
        if narrow or any(matrix.dtype == torch.float64 for matrix in matrices):
            config._experts_implementation = "eager"  # type: ignore[union-attr]


def _count(module: nn.Module, plan: ParallelPlan, name: str) -> int:
    """The number of experts that share the rows of a parameter: what its module of experts says,
    otherwise one row each."""
    owner = next((experts for experts in plan.experts if name.startswith(f"{experts}.")), "")
    count = getattr(module.get_submodule(owner), "num_experts", None)
    return (
        count
        if owner and isinstance(count, int)
        else next(iter(module.get_parameter(name).shape), 0)
    )


def _expert_parameters(module: nn.Module, plan: ParallelPlan) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters whose first dimension is the experts, or the rows of one expert after the
    other."""
    for name, parameter in module.named_parameters():
        cut = plan.cut_of(name)
        if cut is not None and cut.style == "grouped_gemm":
            yield name, parameter
