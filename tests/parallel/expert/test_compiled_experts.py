"""Compiled blocks whose experts are on several ranks: one graph each, with the numbers of
uncompiled blocks and of one process."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from crowded_experts import Crowded
from overlapped_mixtures import BLOCKS, exchanges, make, run
from parity import Module, Part, Rows, assert_same_run, fit_on_rank
from ranks import run_ranks
from reference import Recipe, data, reference
from sweeps import by_default
from torch import Tensor

from lightning_3d.compat import torch as torch_compat
from lightning_3d.parallel.blocks import Compilation
from lightning_3d.parallel.expert import expert_operators, experts

KINDS = {"deepseek_v3": 2, "crowded": 2}
"""Kinds of blocks in a model, where there are several: its first block is dense."""


def run_both(
    model: str, dtype: str, backend: str, **strategy: Any
) -> tuple[Part, Part, dict[str, int], int]:
    """The run without and with compilation, and the latter's graph breaks and graphs. Each step
    sends other numbers of tokens."""
    recipe = Recipe("deepseek_v3" if model == "crowded" else model, steps=3, dtype=dtype)
    kind, parts = Crowded if model == "crowded" else Module, []
    torch._dynamo.reset()
    before, broken = torch_compat.compiled_graphs(), torch_compat.graph_breaks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        for compiled in (False, True):
            parts.append(
                fit_on_rank(
                    recipe,
                    Rows(data(recipe)),
                    kind(recipe),
                    compile=compiled,
                    self_check="never",
                    **strategy,
                )
            )
    plain, compiled = parts
    return (
        plain,
        compiled,
        dict(torch_compat.graph_breaks() - broken),
        torch_compat.compiled_graphs() - before,
    )


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2_moe", "float64", {"layout": "tp2_ep2"}),
    ("mixtral", "float32", {"layout": "ep2_dp2", "zero_stage": 1, "recompute": "full"}),
    ("mixtral", "float64", {"layout": "ep2_dp2"}),
    ("mixtral", "float32", {"layout": "ep2_dp2"}),
    ("mixtral", "float64", {"layout": "ep2_dp2", "recompute": "selective"}),
    (
        "mixtral",
        "float64",
        {"layout": "ep2_dp2", "recompute": "selective", "recompute_keep": ["mm"]},
    ),
    ("mixtral", "float64", {"layout": "ep2_dp2", "recompute": "full"}),
    ("mixtral", "float32", {"layout": "ep2_dp2", "zero_stage": 3, "offload_activations": True}),
    ("crowded", "float64", {"layout": "ep2_dp2"}),
    ("crowded", "float32", {"layout": "ep2_dp2", "recompute": "full"}),
    ("qwen2_moe", "float64", {"layout": "tp2_ep2", "recompute": "selective"}),
    (
        "qwen2_moe",
        "float64",
        {"layout": "tp2_ep2", "recompute": "selective", "recompute_keep": ["mm"]},
    ),
    ("qwen2_moe", "float64", {"layout": "tp2_ep2", "sequence_parallel": True, "recompute": "full"}),
    ("qwen2_moe", "float64", {"layout": "pp2_ep2_dp2"}),
    ("qwen2_moe", "float32", {"layout": "pp2_ep2_dp2", "zero_stage": 1, "recompute": "selective"}),
    ("qwen2_moe", "float64", {"layout": "pp2_ep2_dp2", "schedule": "ZBVZeroBubble"}),
    ("mixtral", "float64", {"layout": "tp2_ep2_dp2"}),
    ("mixtral", "float64", {"layout": "tp2_pp2_ep2", "recompute": "full"}),
    ("gpt_oss", "float32", {"layout": "ep2_dp2"}),
]


def _name(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else "-".join(str(key if item is True else item) for key, item in value.items())
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "dtype", "options", "backend"),
    by_default([(*case, backend) for backend in ("aot_eager", "inductor") for case in CASES], 1),
    ids=_name,
)
def test_blocks_of_experts_on_several_ranks_are_one_graph(
    model: str, dtype: str, options: dict[str, Any], backend: str
) -> None:
    ranks = math.prod(
        int(part[2:]) for part in options["layout"].split("_") if not part.startswith("ep")
    )
    results = run_ranks(
        run_both, ranks, model, dtype, backend, micro_batch_size=4, timeout=500, **options
    )
    exact = 1e-6 if dtype == "float32" else 1e-12 if backend == "aot_eager" else 1e-9
    # Adam divides small gradients by their size
    moved = 10 * exact if backend == "aot_eager" else 1e-5
    for plain, compiled, breaks, graphs in results:
        assert breaks == {} and graphs <= KINDS.get(model, 1)
        assert compiled.losses == pytest.approx(plain.losses, rel=exact)
        assert compiled.grad_norms == pytest.approx(plain.grad_norms, rel=10 * exact)
        for name, weight in plain.weights.items():
            torch.testing.assert_close(compiled.weights[name], weight, rtol=100 * exact, atol=moved)
    if model != "crowded":
        expected, _ = reference(Recipe(model, steps=3, dtype=dtype))
        assert_same_run([compiled for _, compiled, _, _ in results], expected, dtype)


EVENTS: list[str] = []


@torch.library.custom_op("lightning_3d_tests::seen", mutates_args=())
def seen(x: Tensor, what: str) -> Tensor:
    """`x` in new memory, noted when a graph runs it."""
    EVENTS.append(what)
    return x.clone()


seen.register_fake(lambda x, what: torch.empty_like(x))
seen.register_autograd(lambda ctx, gradient: (seen(gradient, "shared"), None))


def in_a_graph(
    block: str, backend: str, node_size: int | None
) -> tuple[list[Tensor], list[Tensor], list[str], int, int]:
    """Results without and with compilation; then what happened, how often a hook saw a gradient,
    and how many records are left."""
    plain = run(make(block, overlap=True, node_size=node_size))
    mlp = make(block, overlap=True, node_size=node_size)
    Compilation(torch.device("cpu"), "1F1B", 1, in_order=True)
    shared, gradients = mlp.get_submodule(BLOCKS[block][1]), [0]
    shared.gate_proj.register_forward_pre_hook(lambda _, args: (seen(args[0], "shared"), *args[1:]))  # type: ignore[union-attr]
    mlp.experts.gate_up_proj.register_hook(lambda _: gradients.append(1))  # type: ignore[union-attr, operator]
    EVENTS.clear()
    with exchanges(lambda: EVENTS.append("sent"), lambda: EVENTS.append("arrived")):
        found = run(
            torch.compile(mlp, backend=backend, fullgraph=True), lambda: EVENTS.append("backward")
        )  # type: ignore[arg-type]
    return plain, found, list(EVENTS), sum(gradients), len(expert_operators._records)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "ranks", "node_size", "backend"),
    by_default(
        [
            (*case, backend)
            for backend in ("aot_eager", "inductor")
            for case in (("deepseek", 2, None), ("deepseek", 4, 2), ("qwen", 2, None))
        ],
        0,
    ),
)
def test_in_a_graph_a_shared_expert_runs_while_tokens_travel(
    block: str, ranks: int, node_size: int | None, backend: str
) -> None:
    """Forward and backward, as uncompiled."""
    for plain, found, events, seen_by_hook, left in run_ranks(
        in_a_graph, ranks, block, backend, node_size, timeout=200
    ):
        middle = events.index("backward")
        assert events[:3] == ["sent", "shared", "arrived"]
        assert events[-3:] == ["sent", "shared", "arrived"] and middle + 4 < len(events)
        assert (seen_by_hook, left) == (1, 0)
        for value, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


def with_draws() -> tuple[list[Tensor], list[Tensor], list[str]]:
    plain = run(make("deepseek", overlap=True, node_size=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "draws_numbers", lambda module: True)
        mlp = make("deepseek", overlap=True, node_size=None)
    before = torch_compat.graph_breaks()
    found = run(torch.compile(mlp, backend="aot_eager"))  # type: ignore[arg-type]
    return plain, found, list(torch_compat.graph_breaks() - before)


@pytest.mark.slow
def test_experts_that_draw_numbers_run_outside_of_graphs() -> None:
    for plain, found, breaks in run_ranks(with_draws, 2, timeout=200):
        assert breaks
        for value, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
