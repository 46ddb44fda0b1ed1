"""Checks of layers that a plan shards, before it does, and of parameters that it replicates, after
the first backward."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.compat.peft_layers import is_adapter
from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.parallel.sharding import ShardSpec

# Rounding differs between ranks only where kernels add in no fixed order; a missing sum changes the
# whole value.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_TOLERANCE = 5e-2


def refuse_computed_weights(module: nn.Module, plan: ParallelPlan) -> None:
    """Refuse to shard layers whose weight is computed from other parameters (`weight_norm`,
    `spectral_norm`, any parametrization).

    Raises:
        PlanError: with the first such layer.
    """
    for name, layer in module.named_modules():
        computed = "weight" not in layer._parameters or hasattr(layer, "parametrizations")
        if (
            isinstance(layer, (nn.Linear, nn.Embedding))
            and computed
            and not is_adapter(layer)
            and plan.cut_of(name) is not None
        ):
            raise PlanError(
                f"The plan shards '{name}', but its weight is computed from other parameters"
                " (weight_norm, spectral_norm or another parametrization), and a rank has only a"
                " part of these. Leave the layer and its partner of the other style out of the"
                " plan's 'tp' part, remove the parametrization, or use tp=1."
            )


def check_replicated_gradients(
    module: nn.Module,
    specs: dict[str, ShardSpec],
    group: dist.ProcessGroup,
    gradient_of: Callable[[nn.Parameter], Tensor | None] = attrgetter("grad"),
) -> None:
    """Compare the gradients of replicated parameters over the ranks, after a backward and before
    any reduction.

    A parameter that every rank holds whole but uses on its own heads only gets a different, partial
    gradient on each rank, and the replicas would silently diverge. One all-reduce over `group` of
    four numbers per replicated parameter.

    Args:
        gradient_of: a parameter's local gradient, where it is not its `.grad`.

    Raises PlanError on all ranks, naming the first such parameter and the style that it needs.
    """
    size = dist.get_world_size(group)
    replicated = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
        and len(specs[name].tp_replicas) == size > 1
        and not specs[name].tp_grad_sum
    ]
    if not replicated:
        return
    prints = torch.stack(
        [_fingerprint(gradient_of(parameter), parameter.device) for _, parameter in replicated]
    )
    extremes = torch.stack([prints, -prints])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    spread = (extremes[0] + extremes[1]).amax(-1).tolist()
    scale = torch.maximum(extremes[0].abs(), extremes[1].abs()).amax(-1).tolist()
    for (name, parameter), difference, largest in zip(replicated, spread, scale, strict=True):
        if difference > _TOLERANCE.get(parameter.dtype, _COARSE_TOLERANCE) * largest:
            raise PlanError(
                f"The gradient of '{name}' differs between the tensor-parallel ranks (by"
                f" {difference:.3g}; the largest value is {largest:.3g}). This happens if each rank"
                " uses the parameter on its own part of a tensor. Name its module in the plan's"
                " 'tp' part with the style 'replicated_with_grad_allreduce', or with 'colwise' if"
                " it has one entry per head."
            )


def _fingerprint(gradient: Tensor | None, device: torch.device) -> Tensor:
    """(norm, projection on a fixed random direction) of a gradient, float64; zeros for none."""
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64, device=device)
    gradient = gradient.detach().to(torch.float64).flatten()
    # A fixed direction without touching any random state.
    direction = torch.sin(
        torch.arange(1, gradient.numel() + 1, dtype=torch.float64, device=gradient.device) * 12.9898
    )
    return torch.stack([gradient.norm(), gradient @ direction])
