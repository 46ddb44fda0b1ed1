"""Tokens to their experts and back: exact, however uneven, and each sent once."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import recording
from ranks import run_ranks
from small_experts import small_experts
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks.planner_accuracy.software import published_machine
from lightning_3d.app.planner.constants import OURS
from lightning_3d.layout import Layout
from lightning_3d.models.parallel_plan import Cut, ParallelPlan
from lightning_3d.parallel.expert import ExpertParallel, choose_products, shard_experts
from lightning_3d.parallel.expert.exchange import exchange
from lightning_3d.parallel.expert.losses import fits
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import cut_along

EXPERTS, HIDDEN, CHOICES = 8, 6, 2
PLAN = ParallelPlan(
    {
        "experts": Cut("ep_dispatch_experts"),
        "experts.gate_up_proj": Cut("grouped_gemm"),
        "experts.down_proj": Cut("grouped_gemm"),
    }
)
LOADS = {
    "even": [(5, None), (5, None), (5, None), (5, None)],
    "different numbers of tokens": [(7, None), (1, None), (4, None), (2, None)],
    "a rank without tokens": [(3, None), (0, None), (5, None), (1, None)],
    "one token in all": [(0, None), (0, None), (1, None), (0, None)],
    "all tokens to one expert": [(4, 3), (6, 3), (2, 3), (5, 3)],
    "no tokens at all": [(0, None)] * 4,
}


@dataclass
class Results:
    output: Tensor
    gradients: list[Tensor]  # of tokens and weights
    experts: list[Tensor]  # of the parameters
    sent: list[int]  # elements that this rank handed over, per all-to-all
    waits: int


def tokens_of(rank: int, rows: int, hot: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts (two different ones for each token), weights."""
    generator = torch.Generator().manual_seed(10 + rank)
    hidden = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    chosen = torch.rand(rows, EXPERTS, generator=generator).argsort(-1)[:, :CHOICES]
    if hot is not None:
        chosen = torch.tensor([hot, (hot + 1) % EXPERTS]).expand(rows, CHOICES).clone()
    weights = torch.rand(rows, CHOICES, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), chosen, weights.requires_grad_()


def dispatch(loads: list[tuple[int, int | None]], node_size: int | None = None) -> Results:
    """One forward and backward on this rank of an expert-parallel group that is the world, on nodes
    of so many ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = small_experts(EXPERTS, HIDDEN)
    share = EXPERTS // size
    specs = {
        name: cut_along(name, value.shape, 0, [(rank * share, share)], tp_replicas=(0,))
        for name, value in module.named_parameters()
    }
    nodes = Mesh(Layout(dp=size, ep=size), node_size=node_size).expert_nodes
    shard_experts(module, PLAN, specs, ExpertParallel(dist.group.WORLD, size, rank, nodes=nodes))
    hidden, chosen, weights = tokens_of(rank, *loads[rank])
    waits: list[None] = []
    tolist = Tensor.tolist
    Tensor.tolist = lambda self: (waits.append(None), tolist(self))[1]  # type: ignore[method-assign]
    try:
        with recording() as recorder:
            output = module["experts"](hidden, chosen, weights)
            output.square().sum().backward()
    finally:
        Tensor.tolist = tolist  # type: ignore[method-assign]
    sent = [call.numel for call in recorder.calls if call.name == "all_to_all_single"]
    gradients = [hidden.grad, weights.grad]
    experts = [parameter.grad for parameter in module["experts"].parameters()]
    assert all(gradient is not None for gradient in (*gradients, *experts))
    return Results(output.detach(), gradients, experts, sent, len(waits))  # type: ignore[arg-type]


@pytest.mark.parametrize("node_size", [None, 2, 1])
@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS.keys())
def test_the_output_and_all_gradients_are_those_of_one_process(
    loads: list[tuple[int, Any]], node_size: int | None
) -> None:
    found = run_ranks(dispatch, 4, loads, node_size)
    module = small_experts(EXPERTS, HIDDEN)
    parts = [tokens_of(rank, *load) for rank, load in enumerate(loads)]
    whole = module["experts"](*(torch.cat([part[index] for part in parts]) for index in range(3)))
    if whole.requires_grad:
        whole.square().sum().backward()
    start = 0
    for part, result in zip(parts, found, strict=True):
        rows = len(part[0])
        torch.testing.assert_close(
            result.output, whole[start : start + rows].detach(), rtol=1e-13, atol=1e-13
        )
        for gradient, expected in zip(result.gradients, (part[0].grad, part[2].grad), strict=True):
            torch.testing.assert_close(
                gradient,
                torch.zeros_like(gradient) if expected is None else expected,
                rtol=1e-12,
                atol=1e-12,
            )
        start += rows
    for index, parameter in enumerate(module["experts"].parameters()):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            torch.cat([result.experts[index] for result in found]), expected, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("name", ["different numbers of tokens", "all tokens to one expert"])
def test_each_pair_travels_once_each_way_with_one_wait(name: str) -> None:
    """There and back, forward and backward; before that the counts, one number for each expert."""
    loads = LOADS[name]
    found = run_ranks(dispatch, 4, loads)
    pairs = sum(rows for rows, _ in loads) * CHOICES
    for result in found:
        assert len(result.sent) == 5 and result.sent[0] == EXPERTS and result.waits == 1
    for way in range(1, 5):
        assert sum(result.sent[way] for result in found) == pairs * HIDDEN


def exchange_halves() -> list[float]:
    """Two ranks exchange halves of a bf16 tensor, and its gradient back."""
    rank = dist.get_rank()
    x = torch.full((4, 3), float(rank + 1), dtype=torch.bfloat16, requires_grad=True)
    result = exchange(x, dist.group.WORLD, [1, 3], [1, 1] if rank == 0 else [3, 3])
    (result * (rank + 1)).sum().backward()
    assert result.dtype == x.grad.dtype == torch.bfloat16
    return [*result[:, 0].tolist(), *x.grad[:, 0].tolist()]


def test_bf16_travels_as_it_is() -> None:
    assert run_ranks(exchange_halves, 2) == [[1, 2, 1, 2, 2, 2], [1, 1, 1, 2, 2, 2, 1, 2, 2, 2]]


@pytest.mark.filterwarnings("ignore:The experts run one by one")
@pytest.mark.parametrize(
    ("dtype", "width", "chosen"),
    [
        *(
            (torch.float32, 12, "grouped_mm"),
            (torch.float64, 12, "eager"),
            (torch.float32, 10, "eager"),
        ),
        *((torch.bfloat16, 16, "grouped_mm"), (torch.bfloat16, 12, "eager")),
    ],
)
def test_experts_multiply_in_a_loop_in_float64_and_where_rows_are_narrow(
    dtype: torch.dtype, width: int, chosen: str
) -> None:
    """And the planner charges a start for each of them (`Stack.expert_starts`)."""
    config = MixtralConfig(hidden_size=8, intermediate_size=width, num_local_experts=EXPERTS)
    config._experts_implementation = "grouped_mm"
    module = nn.ModuleDict({"experts": MixtralExperts(config).to(dtype)})
    choose_products(module, replace(PLAN, experts=("experts",)))
    assert module["experts"].config._experts_implementation == chosen
    if dtype == torch.bfloat16:
        starts = OURS.expert_starts(
            EXPERTS, "bf16", (2 * width, 8, width), published_machine("H100", 8)
        )
        assert starts == (1 if chosen == "grouped_mm" else EXPERTS)


def test_autocast_leaves_grouped_products_in_the_type_of_the_weights() -> None:
    """So experts multiply in float32 with bf16-mixed: see `Stack.expert_precision`."""
    rows, weights, ends = (
        torch.ones(4, 8),
        torch.ones(2, 8, 8),
        torch.tensor([2, 4], dtype=torch.int32),
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.functional.grouped_mm(rows, weights, offs=ends).dtype == torch.float32
        assert torch.mm(rows, weights[0]).dtype == torch.bfloat16


def mixed(size: int, products: str) -> Tensor:
    """Outputs of all tokens with float32 weights under autocast, on this rank: those of its
    experts, or of all with one process."""
    config = MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=EXPERTS)
    module = nn.ModuleDict({"experts": MixtralExperts(config)})
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    hidden, weights = (
        torch.randn(20, 8, generator=generator),
        torch.rand(20, CHOICES, generator=generator),
    )
    chosen = torch.rand(20, EXPERTS, generator=generator).argsort(-1)[:, :CHOICES]
    config._experts_implementation = products
    if size > 1:
        rank, share = dist.get_rank(), EXPERTS // size
        cuts = [(rank * share, share)]
        specs = {
            name: cut_along(name, value.shape, 0, cuts, tp_replicas=(0,))
            for name, value in module.named_parameters()
        }
        shard_experts(module, PLAN, specs, ExpertParallel(dist.group.WORLD, size, rank))
        choose_products(module, replace(PLAN, experts=("experts",)))
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = module["experts"](hidden, chosen, weights).detach()
    return output


def test_experts_multiply_under_autocast_in_the_type_in_which_one_process_does() -> None:
    """Grouped products in float32. A loop over experts multiplies in bfloat16, because autocast
    knows linear layers."""
    grouped, loop = mixed(1, "grouped_mm"), mixed(1, "eager")
    assert (grouped - loop).abs().max() > 1e-3 * grouped.abs().max()
    for output in run_ranks(mixed, 2, 2, "grouped_mm"):
        torch.testing.assert_close(output, grouped, rtol=1e-6, atol=1e-6)


def test_room_is_given_to_first_choices_then_to_earlier_tokens() -> None:
    chosen = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 3]])
    # Two of each: expert 0 is the first choice of tokens 0, 1 and 3, and the second of token 2.
    assert fits(chosen, 4, 1.0).tolist() == [
        [True, True],
        [True, True],
        [True, False],
        [False, True],
    ]
    assert fits(chosen, 4, 2.0).all()
    assert fits(chosen, 4, 0.5).tolist() == [
        [True, False],
        [False, True],
        [True, False],
        [False, True],
    ]
