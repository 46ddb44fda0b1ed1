"""Experts on several nodes: what crosses between nodes and within them, in bytes, and training over
both tiers."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from parity import assert_same_training
from ranks import run_ranks
from torch import Tensor, nn
from transformers import DeepseekV3Config, MixtralConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.layout.node_ranks import by_node
from lightning_3d.models.parallel_plan import Cut, ParallelPlan
from lightning_3d.parallel import gloo_exchange
from lightning_3d.parallel.expert import ExpertParallel, shard_experts
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import cut_along
from lightning_3d.strategy import Lightning3DStrategy

RANKS, EXPERTS, HIDDEN, CHOICES, TOKENS = 4, 8, 6, 4, 9
WIDTH = 8  # bytes of a number
PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
PLAN = ParallelPlan(
    {"experts": Cut("ep_dispatch_experts"), **{name: Cut("grouped_gemm") for name in PARAMETERS}}
)


class Message(NamedTuple):
    """Bytes of one all-to-all that this rank sends to each rank."""

    bytes: dict[int, int]
    row: int  # bytes of a row


@contextlib.contextmanager
def messages() -> Iterator[list[Message]]:
    """All-to-all of rows meanwhile, without the counts."""
    found: list[Message] = []
    original = gloo_exchange.start_all_to_all

    def send(output: Tensor, x: Tensor, received: Any, sent: Any, group: Any) -> Any:
        if sent is not None:
            row = x[:1].numel() * x.element_size() if len(x) else 0
            ranks = dist.get_process_group_ranks(group)
            found.append(
                Message({rank: rows * row for rank, rows in zip(ranks, sent, strict=True)}, row)
            )
        return original(output, x, received, sent, group)

    with patch.object(gloo_exchange, "start_all_to_all", send):
        yield found


def choices(rank: int, groups: int) -> Tensor:
    """Experts (tokens, choices) that DeepSeek-V3's router chooses for a rank's tokens, from so many
    of four groups of experts."""
    sizes = {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": CHOICES,
        "n_group": 4,
        "topk_group": groups,
    }
    router = DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=HIDDEN, **sizes))
    generator = torch.Generator().manual_seed(1)
    router.weight.data = torch.randn(router.weight.shape, generator=generator)
    return router(torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(10 + rank)))[
        2
    ]


def traffic(node_size: int | None, groups: int) -> tuple[list[Message], list[Message]]:
    """What this rank of four sends forward and backward."""
    rank, share = dist.get_rank(), EXPERTS // RANKS
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=10, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    module = nn.ModuleDict({"experts": MixtralExperts(config).double()})
    specs = {
        name: cut_along(name, value.shape, 0, [(rank * share, share)], tp_replicas=(0,))
        for name, value in module.named_parameters()
    }
    nodes = Mesh(Layout(dp=RANKS, ep=RANKS), node_size=node_size).expert_nodes
    shard_experts(module, PLAN, specs, ExpertParallel(dist.group.WORLD, RANKS, rank, nodes=nodes))
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(TOKENS, CHOICES, dtype=torch.float64, requires_grad=True)
    with messages() as forward:
        output = module["experts"](hidden, choices(rank, groups), weights)
    with messages() as backward:
        output.sum().backward()
    return forward, backward


def across(rank: int, sent: list[Message], node_size: int) -> int:
    """Bytes that leave a rank's node."""
    return sum(
        size
        for message in sent
        for to, size in message.bytes.items()
        if to // node_size != rank // node_size
    )


def rows_across(rank: int, groups: int, node_size: int) -> int:
    """Pairs (token, another node on which it has experts)."""
    per_node = EXPERTS // RANKS * node_size
    return sum(
        len({expert // per_node for expert in token} - {rank // node_size})
        for token in choices(rank, groups).tolist()
    )


def pairs_across(rank: int, groups: int, node_size: int) -> int:
    """Pairs (token, expert on another node)."""
    per_node = EXPERTS // RANKS * node_size
    return sum(
        expert // per_node != rank // node_size
        for token in choices(rank, groups).tolist()
        for expert in token
    )


def returned_across(rank: int, groups: int, node_size: int) -> int:
    """Rows that a rank returns to the ranks in its place on other nodes: one for each token that
    they sent."""
    peers = [peer for peer in range(RANKS) if peer % node_size == rank % node_size and peer != rank]
    per_node = EXPERTS // RANKS * node_size
    wanted = [
        {expert // per_node for expert in token}
        for peer in peers
        for token in choices(peer, groups).tolist()
    ]
    return sum(rank // node_size in nodes for nodes in wanted)


def test_a_token_crosses_once_to_each_node_not_once_to_each_expert() -> None:
    """There with its experts and their weights, and one row back; backward the gradients of all of
    them but the experts' numbers."""
    tiers, direct = run_ranks(traffic, RANKS, 2, 4), run_ranks(traffic, RANKS, None, 4)
    row, extra = HIDDEN * WIDTH, CHOICES * WIDTH
    for rank in range(RANKS):
        there, back = rows_across(rank, 4, 2), returned_across(rank, 4, 2)
        forward, backward = tiers[rank]
        assert across(rank, forward, 2) == there * (row + 2 * extra) + back * row
        assert across(rank, backward, 2) == back * (row + extra) + there * row
        pairs = pairs_across(rank, 4, 2)
        assert pairs > there and across(rank, direct[rank][0][:1], 2) == pairs * row
    every = [
        [message for message in forward + backward if message.row == row]
        for forward, backward in tiers
    ]
    whole = sum(across(rank, sent, 2) for rank, sent in enumerate(every))
    assert whole == 4 * row * sum(rows_across(rank, 4, 2) for rank in range(RANKS))


def test_within_a_node_each_pair_is_sent_to_its_expert_once() -> None:
    """By the rank in the place of the one that has the token."""
    for rank, (forward, _) in enumerate(run_ranks(traffic, RANKS, 2, 4)):
        neighbour, peers = rank ^ 1, [peer for peer in range(RANKS) if peer % 2 == rank % 2]
        pairs = sum(
            expert // 2 == neighbour
            for peer in peers
            for token in choices(peer, 4).tolist()
            for expert in token
        )
        within = [message.bytes[neighbour] for message in forward if neighbour in message.bytes]
        assert len(within) == 2 and within[0] == pairs * HIDDEN * WIDTH


@pytest.mark.parametrize("groups", [2, 3])
def test_node_limited_routing_bounds_the_nodes_of_a_token(groups: int) -> None:
    """Each of four nodes has one of DeepSeek-V3's groups of experts: a token is sent to as many
    nodes as it may choose groups."""
    for rank, (forward, _) in enumerate(run_ranks(traffic, RANKS, 1, groups)):
        per_token = [
            len({expert // 2 for expert in token}) for token in choices(rank, groups).tolist()
        ]
        assert max(per_token) == groups, "the limit is reached"
        assert forward[0].row == HIDDEN * WIDTH
        sent = {node: size // forward[0].row for node, size in forward[0].bytes.items()}
        assert sum(sent.values()) == sum(per_token) <= TOKENS * groups
        assert all(rows <= TOKENS for rows in sent.values())


def groups_of(layout: str, node_size: int) -> Any:
    nodes = Mesh(Layout.parse(layout), node_size=node_size).expert_nodes
    if nodes is None:
        return None
    return (
        tuple(dist.get_process_group_ranks(nodes.across)),
        tuple(dist.get_process_group_ranks(nodes.within)),
        nodes.nodes,
        nodes.node,
    )


def test_ranks_with_the_same_place_on_their_nodes_are_connected() -> None:
    assert run_ranks(groups_of, 4, "ep4_dp4", 2) == [
        ((0, 2), (0, 1), 2, 0),
        ((1, 3), (0, 1), 2, 0),
        ((0, 2), (2, 3), 2, 1),
        ((1, 3), (2, 3), 2, 1),
    ]
    assert run_ranks(groups_of, 4, "ep2_dp4", 2) == [None] * 4
    assert by_node(range(6), 4) == [] and by_node((0, 1, 4, 5), 4) == [(0, 1), (4, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "schedule", "options"),
    [
        ("deepseek_v3", "tp2_ep4_dp2", "1F1B", {"moe_node_size": 2}),
        pytest.param(
            "qwen2_moe",
            "ep4_dp4",
            "1F1B",
            {"moe_node_size": 2, "recompute": "full"},
            marks=pytest.mark.full,
        ),
        pytest.param(
            "mixtral",
            "ep8_dp8",
            "1F1B",
            {"moe_node_size": 2, "micro_batch_size": 2},
            marks=pytest.mark.full,
        ),
        pytest.param("mixtral", "ep4_dp4", "1F1B", {"moe_node_size": 1}, marks=pytest.mark.full),
        pytest.param(
            "deepseek_v3",
            "tp2_ep4_pp2_dp2",
            "ZBVZeroBubble",
            {"moe_node_size": 2},
            marks=pytest.mark.full,
        ),
        pytest.param(
            "deepseek_v3",
            "tp2_ep4_dp2",
            "1F1B",
            {"moe_node_size": 2, "sequence_parallel": False},
            marks=pytest.mark.full,
        ),
    ],
)
def test_training_over_two_tiers_is_that_of_one_process(
    model: str, layout: str, schedule: str, options: dict[str, Any]
) -> None:
    assert_same_training(model, layout, schedule, dtype="float64", **options)


@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 3])
def test_zero_over_two_tiers(zero: int) -> None:
    assert_same_training("deepseek_v3", "ep4_pp2_dp4", zero=zero, moe_node_size=2)


@pytest.mark.parametrize("size", [0, 1.5])
def test_a_node_has_a_whole_number_of_ranks(size: Any) -> None:
    with pytest.raises(ConfigError, match="moe_node_size must be"):
        Lightning3DStrategy("ep2_dp2", moe_node_size=size)


@pytest.mark.parametrize(
    ("layout", "size", "near"),
    [
        ("ep4_dp4", 3, "2 and 4"),
        ("ep4_dp8", 5, "4 and 6"),
        ("ep6_dp6", 4, "3 and 6"),
        ("tp2_ep4_dp2_pp2", 3, "2 and 4"),
    ],
)
def test_a_node_size_that_splits_experts_unevenly_is_refused(
    layout: str, size: int, near: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"moe_node_size={size} .* unevenly on nodes.* work are {near}"
    ):
        Lightning3DStrategy(layout, moe_node_size=size)
    Lightning3DStrategy(layout, moe_node_size=int(near[0]))
    Lightning3DStrategy(layout, moe_node_size=int(near[-1]))
