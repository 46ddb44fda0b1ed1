"""Runs one model whole and cut over tensor-parallel ranks, for comparison."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.engine.self_check.local_sizes import apply_local_sizes, find_local_sizes
from lightning_3d.models.parallel_plan import ParallelPlan, read_plan
from lightning_3d.parallel.sequence_shards import SequenceShards
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.tensor import (
    TensorParallel,
    VocabParallelLogits,
    find_regions,
    gather_regions,
    resolve,
    rewrite,
    shard_sequence,
    shard_specs,
)
from lightning_3d.parallel.tensor.head_arguments import Place

Gradients = dict[str, Tensor]


@dataclass
class Result:
    """What one rank sees after a forward and a backward."""

    loss: float
    logits: Tensor
    gradients: Gradients
    specs: dict[str, ShardSpec]


def build(name: str, dtype: torch.dtype = torch.float64, layers: int = 2) -> nn.Module:
    """A model with no zero or one left in it, so that a forgotten bias or norm shows."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        model = models.build(name, layers)
    finally:
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return model


def user_plan(name: str) -> dict[str, Any] | None:
    return models.PlainModel.plan if name == models.PLAIN else None


def batch(name: str, length: int = models.SEQUENCE) -> Tensor:
    """Token ids, (3, length)."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, models.vocabulary(name), (3, length), generator=generator)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    out = model(ids)
    return out if isinstance(out, Tensor) else out.logits


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """What users write: the next token, in the logits' own precision."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def run_whole(
    name: str, dtype: torch.dtype = torch.float64, length: int = models.SEQUENCE
) -> Result:
    """The model on one process."""
    model, ids = build(name, dtype), batch(name, length)
    logits = logits_of(model, ids)
    loss = loss_of(logits, ids)
    loss.backward()
    gradients = {key: gradient_of(parameter) for key, parameter in model.named_parameters()}
    return Result(loss.item(), logits.detach(), gradients, {})


def cut(
    model: nn.Module,
    plan: dict[str, Any] | None = None,
    random: Any = None,
    *,
    sequence: bool = False,
    example: Tensor | None = None,
) -> tuple[ParallelPlan, dict[str, ShardSpec]]:
    """Cut a whole model over all ranks, in place; with `sequence` parallelism. Where it is not one
    of Transformers', `example` is an input with which the head counts of a rank are found.
    """
    parsed = read_plan(model, plan)
    size, rank = dist.get_world_size(), dist.get_rank()
    sizes = find_local_sizes(model, parsed, size, (example,), {}) if example is not None else {}
    regions = find_regions(model, parsed, resolve(model, parsed, size)) if sequence else None
    specs = shard_specs(model, parsed, size, rank, regions)
    group = dist.group.WORLD
    assert group is not None
    context = TensorParallel(group, size, rank, random, SequenceShards(size))
    if regions is not None:
        gather_regions(model, regions, context)
        shard_sequence(model, regions, context)
    rewrite(model, parsed, specs, context, regions)
    apply_local_sizes(model, sizes, Place(rank, size))
    return parsed, specs


def run_cut(
    name: str,
    dtype: torch.dtype = torch.float64,
    length: int = models.SEQUENCE,
    *,
    sequence: bool = False,
) -> Result:
    """The model on this rank."""
    model, ids = build(name, dtype), batch(name, length)
    _, specs = cut(model, user_plan(name), sequence=sequence)
    logits = logits_of(model, ids)
    assert isinstance(logits, VocabParallelLogits)
    loss = loss_of(logits, ids)
    loss.backward()
    return Result(loss.item(), logits.full().detach(), summed_gradients(model, specs), specs)


def summed_gradients(model: nn.Module, specs: dict[str, ShardSpec]) -> Gradients:
    """Gradients of the local parameters, partial ones summed over the ranks that share them."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = gradient_of(parameter)
        if specs[name].tp_grad_sum:
            parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, gradient)
            gradient = torch.stack([parts[rank] for rank in specs[name].tp_grad_sum]).sum(0)
        gradients[name] = gradient
    return gradients


def gradient_of(parameter: nn.Parameter) -> Tensor:
    return (
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
    )


def pasted(results: list[Result], name: str) -> Tensor:
    """The full gradient, put together from the shards of all ranks; NaN where no rank has
    anything."""
    spec = results[0].specs[name]
    full = torch.full(spec.global_shape, float("nan"), dtype=results[0].gradients[name].dtype)
    for result in results:
        result.specs[name].paste(result.gradients[name], full)
    return full


def twin(model: nn.Module, change: Callable[[nn.Module], Any]) -> nn.Module:
    """A changed copy."""
    copied = copy.deepcopy(model)
    change(copied)
    return copied
