"""Compiled blocks: each runs as one graph (docs/blocks.md), with the numbers of one process."""

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from parity import (
    Cell,
    Part,
    assert_same_routers,
    assert_same_run,
    strategy_arguments,
    train_on_rank,
)
from ranks import run_ranks
from reference import reference
from sweeps import by_default
from torch._dynamo.backends.registry import lookup_backend

from lightning_3d.parallel.expert import dispatch

LOSSES = (("moe_aux_loss", 0.1), ("moe_z_loss", 0.01))
BIAS = (("moe_aux_loss", 0.1), ("moe_bias_update", 0.01))
CASES: list[tuple[Cell, dict[str, Any]]] = [
    (Cell("mixtral", tp=2, options=LOSSES), {}),
    (Cell("qwen2_moe", tp=2, ep=2, options=LOSSES), {}),
    (Cell("llama", tp=2), {}),
    (Cell("mixtral", dp=2, options=LOSSES), {"recompute": "selective"}),
    (Cell("mixtral", dp=2, options=LOSSES), {"recompute": "selective", "recompute_keep": ["mm"]}),
    (Cell("mixtral", dp=2, ep=2, options=LOSSES), {}),
    (Cell("qwen2_moe", tp=2, options=LOSSES), {"sequence_parallel": True}),
    (Cell("qwen3_moe", cp=2, options=LOSSES), {}),
    (Cell("deepseek_v3", dp=2, zero=1, options=BIAS), {}),
    (Cell("gpt_oss", dp=2, zero=2, options=LOSSES), {}),
]


def counted(cell: Cell, backend: str, **strategy: Any) -> tuple[Part, int, int]:
    """The run, how often it ran a graph forward, and how often it sent tokens to experts."""
    counts = {"graphs": 0, "sent": 0}
    compile_graph, sent = lookup_backend(backend), dispatch._Dispatch

    def count(what: str, function: Any, *args: Any) -> Any:
        counts[what] += 1
        return function(*args)

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return functools.partial(count, "graphs", compile_graph(graph, inputs))

    torch._dynamo.reset()
    compiled = functools.partial(torch.compile, backend=counting)
    with (
        patch.object(torch, "compile", compiled),
        patch.object(dispatch, "_Dispatch", functools.partial(count, "sent", sent)),
    ):
        part = train_on_rank(cell.recipe, compile=True, self_check="never", **strategy)
    return part, counts["graphs"], counts["sent"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "backend"),
    by_default([(case, backend) for backend in ("aot_eager", "inductor") for case in CASES], 0, 1),
    ids=lambda value: value if isinstance(value, str) else "-".join([value[0].name, *value[1]]),
)
def test_a_block_is_one_graph(case: tuple[Cell, dict[str, Any]], backend: str) -> None:
    """A block of one graph has no break. Losses of routers, their statistics and the training are
    those of one process."""
    cell, options = case
    expected, _ = reference(cell.recipe)
    results = run_ranks(
        counted, cell.world_size, cell, backend, **strategy_arguments(cell) | options, timeout=500
    )
    parts = [part for part, _, _ in results]
    assert_same_run(parts, expected)
    if cell.recipe.routers:
        assert_same_routers(parts, expected, cell)
    calls = (
        cell.recipe.layers
        * cell.recipe.steps
        * (cell.recipe.global_batch // cell.dp // cell.micro_batch)
    )
    assert [ran / calls for _, ran, _ in results] == [1] * len(results)
    assert [sent / calls for _, _, sent in results] == [cell.ep > 1] * len(results)
