"""Kernels that round differently on each tensor-parallel rank, as those of GPUs may: copies of a
parameter stay equal nevertheless."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import PropertyMock, patch

import parity
import pytest
import torch
from parity import Cell, Module, Part
from ranks import run_ranks
from reference import reference
from sweeps import by_default

from lightning_3d.errors import ReplicaError
from lightning_3d.strategy import Lightning3DStrategy

NOISE = 1e-8
"""What a rank adds to each element, times its tensor-parallel index."""

SMALL_BUCKETS = 600
OWN = (("zero_reduce", "micro_batch"),)
CELLS = {
    "tp alone": Cell("gpt_neox", tp=2),
    "uneven shards alone": Cell("llama", tp=2, zero=1),
    "zero 0": Cell("qwen2", tp=2, dp=2),
    "zero 2": Cell("qwen2", tp=2, dp=2, zero=2),
    "zero 3 of uneven shards": Cell("llama", tp=2, dp=2, zero=3),
    "tp 4 with copies of keys and values": Cell("llama", tp=4),
    "each micro-batch": Cell("qwen2", tp=2, dp=2, zero=2, options=OWN),
    "zero 3": Cell("qwen2", tp=2, dp=2, zero=3),
    "uneven shards": Cell("llama", tp=2, dp=2, zero=1),
    "uneven shards, each micro-batch": Cell("llama", tp=2, dp=2, zero=2, options=OWN),
    "four data-parallel ranks": Cell("llama", tp=2, dp=4, zero=1),
    "scattered": Cell("qwen2", tp=2, dp=2, zero=1, options=(("zero_reduce_scatter", True),)),
    "shard groups": Cell("qwen2", tp=2, dp=4, zero=3, options=(("zero_shard_size", 2),)),
    "pipeline": Cell("qwen2", tp=2, pp=2, dp=2, zero=1),
    "zero bubble": Cell("llama", tp=2, pp=2, schedule="ZBVZeroBubble"),
    "experts": Cell("mixtral", tp=2, dp=2, ep=2, zero=1),
    "double precision": Cell("llama", tp=2, dp=2, dtype="float64"),
}


@contextmanager
def noisy(equal_copies: bool, noise: float = NOISE) -> Iterator[None]:
    """Context in which gradients of parameters that all tensor-parallel ranks hold arrive with
    noise, on what claims to be a GPU or not."""
    start, nodes = Module.on_train_start, []

    def add_noise(module: Module) -> None:
        strategy: Any = module.trainer.strategy
        mesh = strategy.mesh
        for name, parameter in module.named_parameters():
            if strategy.specs[name].is_replicated(mesh.size("tp")) and parameter.requires_grad:
                # Not by a hook of the tensor: those of users are called with the gradient that is
                # reduced already.
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                node.register_prehook(lambda gradients: (gradients[0] + noise * mesh.index("tp"),))
                nodes.append(node)
        start(module)

    on_accelerator = PropertyMock(return_value=equal_copies)
    with (
        patch.object(Lightning3DStrategy, "_on_accelerator", on_accelerator),
        patch.object(Module, "on_train_start", add_noise),
    ):
        yield


def train(cell: Cell, equal_copies: bool, bucket_bytes: int | None = None) -> Part | str:
    """What a rank has after a run, or the error that ended it."""
    from lightning_3d.parallel.zero import make_backend

    arguments = parity.strategy_arguments(cell) | {
        "reliability": {"check_replicas_every_n_steps": 1},
        "sequence_parallel": False,
    }
    buckets = {"bucket_bytes": bucket_bytes} if bucket_bytes is not None else {}
    noise = NOISE * torch.finfo(getattr(torch, cell.dtype)).eps / torch.finfo(torch.float32).eps
    with noisy(equal_copies, noise), patch.dict(make_backend.__kwdefaults__, buckets):
        try:
            return parity.train_on_rank(cell.recipe, **arguments)
        except ReplicaError as error:
            return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(list(CELLS), 0, 1))
def test_copies_stay_equal(name: str) -> None:
    """Weights are those of one process, as without noise: the first rank, whose gradients count,
    has none."""
    cell = CELLS[name]
    expected, noise = reference(cell.recipe)
    parts = run_ranks(train, cell.world_size, cell, True, timeout=180)
    assert not any(isinstance(part, str) for part in parts), parts[0]
    error, drift = parity.differences(parts, expected)
    assert drift == 0.0
    assert error.within(parity.limits(cell.dtype, noise)), error


@pytest.mark.full
def test_copies_stay_equal_in_several_messages() -> None:
    cell = CELLS["zero 0"]
    whole, split = (
        run_ranks(train, cell.world_size, cell, True, size) for size in (None, SMALL_BUCKETS)
    )
    for one, other in zip(whole, split, strict=True):
        assert one.losses == other.losses and one.grad_norms == other.grad_norms
        assert all(torch.equal(one.weights[key], other.weights[key]) for key in one.weights)


@pytest.mark.parametrize("name", by_default(list(CELLS), 0))
def test_without_it_they_drift_apart(name: str) -> None:
    """Else the tests above would prove nothing."""
    for error in run_ranks(train, CELLS[name].world_size, CELLS[name], False, timeout=180):
        assert isinstance(error, str) and "which should be equal" in error
