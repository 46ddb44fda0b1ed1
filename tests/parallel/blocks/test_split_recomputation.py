"""Recomputation under schedules that compute gradients of inputs and of weights in separate
passes."""

import gc
import weakref
from typing import Any

import models
import pytest
import torch
from parity import Module, Rows, assert_same_training, fit_on_rank
from ranks import run_ranks
from reference import Recipe, data
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.compat.torch import backward_input, backward_weight
from lightning_3d.layout.pipeline_orders import training_order
from lightning_3d.parallel.pipeline.unknown import first_unknown

FULL = pytest.mark.full


class Block(nn.Module):
    """Norm and MLP around a residual. Remembers, without holding them, the results that its
    recomputations made."""

    def __init__(self, width: int, inner: "Block | None" = None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))
        self.inner = inner
        self.forwards = 0
        self.made: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.forwards += 1
        normed = self.norm(hidden)
        gate, up = self.gate(normed), self.up(normed)  # which no gradient of a weight reads
        gated = torch.nn.functional.silu(gate) * up
        self.made += [weakref.ref(result.untyped_storage()) for result in (normed, gate, up, gated)]
        hidden = hidden + self.down(gated)
        return hidden if self.inner is None else checkpoint(self.inner, hidden, use_reentrant=False)

    def alive(self) -> int:
        """Count the remembered results that have not been freed."""
        return sum(reference() is not None for reference in self.made)


def stack(*, nested: bool = False) -> tuple[list[Block], Tensor]:
    torch.manual_seed(0)
    blocks = [Block(8, Block(8) if nested else None).double() for _ in range(3)]
    return blocks, torch.randn(4, 8, dtype=torch.float64, requires_grad=True)


def run(blocks: list[Block], received: Tensor, *, recomputed: bool) -> Tensor:
    hidden = received
    for block in blocks:
        hidden = checkpoint(block, hidden, use_reentrant=False) if recomputed else block(hidden)
    return hidden


def parameters_of(blocks: list[Block]) -> list[nn.Parameter]:
    return [parameter for block in blocks for parameter in block.parameters()]


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "a checkpoint in a block"])
def test_each_part_of_a_split_backward_recomputes_a_block_once(nested: bool) -> None:
    blocks, received = stack(nested=nested)
    parameters = parameters_of(blocks)
    whole = torch.autograd.grad(
        run(blocks, received, recomputed=False).sum(), [received, *parameters]
    )
    for block in blocks:
        block.forwards = 0
    work = backward_input(run(blocks, received, recomputed=True).sum(), None, received, parameters)
    assert [block.forwards for block in blocks] == [2, 2, 2]
    assert work is not None
    backward_weight(parameters, work)
    assert [block.forwards for block in blocks] == [3, 3, 3]
    assert received.grad is not None
    found = [received.grad, *[parameter.grad for parameter in parameters]]
    for gradient, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-13)


def test_recomputed_results_of_one_block_live_at_a_time() -> None:
    """Neither the wait between the two parts, nor the weights of the next block, find anything that
    was recomputed."""
    blocks, received = stack()
    parameters = parameters_of(blocks)
    work = backward_input(run(blocks, received, recomputed=True).sum(), None, received, parameters)
    gc.collect()
    assert [block.alive() for block in blocks] == [0, 0, 0]
    others: list[int] = []

    def count(block: nn.Module, *_: Any) -> None:
        others.append(sum(other.alive() for other in blocks if other is not block))

    for block in blocks:
        block.register_forward_pre_hook(count)
    assert work is not None
    backward_weight(parameters, work)
    assert others == [0, 0, 0]


class Counting(Module):
    """Counts the calls of each layer."""

    def configure_model(self) -> None:
        super().configure_model()
        self.ran = [0] * self.recipe.layers
        for place, layer in enumerate(self.model.model.layers):  # type: ignore[union-attr]
            layer.mlp.register_forward_pre_hook(
                lambda _, args, place=place: first_unknown(args) or self._count(place)
            )

    def _count(self, place: int) -> None:
        self.ran[place] += 1


def count_calls(**strategy: Any) -> list[int]:
    recipe = Recipe(steps=1)
    module = Counting(recipe)
    fit_on_rank(recipe, Rows(data(recipe)), module, **strategy)
    return module.ran


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        "ZBVZeroBubble",
        pytest.param("InterleavedZeroBubble", marks=FULL),
        pytest.param("DualPipeV", marks=FULL),
    ],
)
def test_what_a_schedule_recomputes(schedule: str) -> None:
    """The four stages have one layer each. A layer runs once forward, once for each backward action
    of its stage; the first stage has no part for inputs, since nothing waits for it."""
    count = 4
    options = {
        "schedule": schedule,
        "recompute": "full",
        "micro_batch_size": Recipe().global_batch // count,
        "loss_reduction": "mean",
    }
    parts = run_ranks(count_calls, 2, layout="pp2", **options)
    expected = [0] * 4
    for actions in training_order(schedule, 2, 2, count):
        for stage, kind, _ in actions:
            expected[stage] += not (kind == "I" and stage == 0)
    assert [sum(ran) for ran in zip(*parts, strict=True)] == expected


CASES: list[dict[str, Any]] = [
    {"model": model, "layout": layout, "schedule": schedule}
    for schedule, layout in (
        ("ZBVZeroBubble", "pp2"),
        ("InterleavedZeroBubble", "tp2_pp2"),
        ("DualPipeV", "pp2"),
    )
    for model in models.MODELS
] + [
    {"model": "mixtral", "layout": "pp2_ep2_dp2", "schedule": "ZBVZeroBubble"},
    {"model": "deepseek_v3", "layout": "tp2_ep2_pp2", "schedule": "DualPipeV"},
    {
        "model": "qwen3_moe",
        "layout": "pp2_ep2_dp2",
        "schedule": "InterleavedZeroBubble",
        "zero": 2,
        "dtype": "float32",
    },
    {"layout": "tp2_pp2", "schedule": "ZBVZeroBubble", "sequence_parallel": True},
    {"layout": "pp2_cp2", "schedule": "ZBVZeroBubble"},
    {"layout": "pp2", "schedule": "ZBVZeroBubble", "recompute_every": 2},
    {
        "layout": "pp2_dp2",
        "schedule": "ZBVZeroBubble",
        "zero": 3,
        "zero_reduce": "micro_batch",
        "dtype": "float32",
    },
    {"layout": "pp2", "schedule": "DualPipeV", "offload_activations": True},
    {"layout": "pp2", "schedule": "InterleavedZeroBubble", "loss_chunks": 2},
]


@FULL
@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_every_family_equals_one_process(options: dict[str, Any]) -> None:
    assert_same_training(**{"dtype": "float64", "recompute": "full", **options})
