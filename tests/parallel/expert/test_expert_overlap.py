"""The shared expert runs while tokens travel: the order of events forward and backward, and the
same bits as without it."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import models
import pytest
import torch
from overlapped_mixtures import BLOCKS, EXPERTS, HIDDEN, PLAN, SIZES, TOKENS, exchanges, make, run
from parity import train_on_rank
from ranks import run_ranks
from reference import Recipe
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen2MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP, Qwen2MoeSparseMoeBlock

from lightning_3d.parallel import gloo_exchange
from lightning_3d.parallel.expert import overlap_exchange
from lightning_3d.parallel.expert.overlap import overlapped_forward


def events(block: str, node_size: int | None) -> list[str]:
    mlp = make(block, overlap=True, node_size=node_size)
    found: list[str] = []
    shared = mlp.get_submodule(BLOCKS[block][1])
    shared.gate_proj.register_forward_pre_hook(lambda *_: found.append("first product"))  # type: ignore[union-attr]
    shared.register_forward_hook(
        lambda module, args, output: (
            output.register_hook(lambda _: found.append("gradient enters")) and None
        )
    )
    shared.gate_proj.weight.register_post_accumulate_grad_hook(
        lambda _: found.append("gradient of it")
    )  # type: ignore[union-attr]
    with exchanges(lambda: found.append("sent"), lambda: found.append("arrived")):
        run(mlp, lambda: found.append("backward"))
    return found


@pytest.mark.parametrize("block", BLOCKS)
def test_the_shared_expert_runs_between_start_and_end_of_the_exchange(block: str) -> None:
    """Forward and backward. Then results return, and before the backward their gradients are
    sent."""
    for found in run_ranks(events, 2, block, None):
        middle = found.index("backward")
        forward, backward = found[:middle], found[middle + 1 :]
        assert forward == ["sent", "first product", "arrived", "sent", "arrived"]
        assert [event for event in backward if event != "gradient enters"] == [
            "sent",
            "arrived",
            "sent",
            "gradient of it",
            "arrived",
        ]


def test_the_shared_expert_runs_while_tokens_cross_between_nodes() -> None:
    """Over two tiers there are two exchanges more each way, within the node."""
    for found in run_ranks(events, 4, "deepseek", 2):
        middle = found.index("backward")
        assert found[:middle] == ["sent", "first product", "arrived", *["sent", "arrived"] * 3]
        backward = [event for event in found[middle + 1 :] if event != "gradient enters"]
        assert backward == [*["sent", "arrived"] * 3, "sent", "gradient of it", "arrived"]


def three_ways(block: str, node_size: int | None) -> list[list[Tensor]]:
    """With overlap; with exchanges that are waited for where they start; and as the family wrote
    it."""
    original = gloo_exchange.start_all_to_all

    def blocking(*args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    overlapped = run(make(block, overlap=True, node_size=node_size))
    with patch.object(gloo_exchange, "start_all_to_all", blocking):
        waiting = run(make(block, overlap=True, node_size=node_size))
    return [overlapped, waiting, run(make(block, overlap=False, node_size=node_size))]


@pytest.mark.parametrize(
    ("block", "ranks", "node_size"), [("deepseek", 2, None), ("qwen", 2, None), ("deepseek", 4, 2)]
)
def test_overlap_changes_no_bit(block: str, ranks: int, node_size: int | None) -> None:
    """But of the gradient of the input where the shared expert was called first: its parts are
    added up in another order."""
    for overlapped, waiting, written in run_ranks(three_ways, ranks, block, node_size):
        assert all(
            torch.equal(found, expected)
            for found, expected in zip(overlapped, waiting, strict=True)
        )
        for place, (found, expected) in enumerate(zip(overlapped, written, strict=True)):
            if block == "qwen" and place == 1:
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(found, expected)


def under_way_in_training() -> list[int]:
    """Exchanges that are under way whenever a shared expert runs, in a step of training."""
    counts, found = [0], []
    forward = Qwen2MoeMLP.forward

    def watched(module: nn.Module, x: Tensor) -> Tensor:
        found.append(counts[0])
        return forward(module, x)

    def add(number: int) -> Callable[[], Any]:
        return lambda: counts.append(counts.pop() + number)

    with (
        exchanges(add(1), add(-1), models.COMMON["hidden_size"]),
        patch.object(Qwen2MoeMLP, "forward", watched),
    ):
        train_on_rank(
            Recipe("qwen2_moe", layers=2, steps=1),
            layout="tp2_ep2",
            micro_batch_size=4,
            self_check="never",
        )
    return found


def test_tokens_are_under_way_in_training() -> None:
    for found in run_ranks(under_way_in_training, 2):
        assert found and set(found) == {1}


class Base(nn.Module):
    """A mixture to which its subclasses give a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = (
            nn.Linear(HIDDEN, EXPERTS),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, HIDDEN),
        )

    def route(self, x: Tensor) -> Tensor:
        return self.experts(x * self.gate(x).sum(-1, keepdim=True))


class Added(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.route(x) + self.shared(x)


class Depends(Base):
    """Its other layer needs the result of the experts."""

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.route(x))


class Overwrites(Base):
    """What the other layer sees is changed before."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        routed = self.route(y)
        y.add_(routed)
        return self.shared(y)


class Jitters(Base):
    """Training and evaluation differ."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * 1.01
        return self.route(x) + self.shared(x)


class Decides(Base):
    """Its values decide what it does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.route(x) + (self.shared(x) if x.sum() > 0 else 0)


class Twice(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.route(x) + self.route(-x) + self.shared(x)


class TwoArguments(Base):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.route(x) + self.shared(x if scale is None else x * scale)


class Makes(Base):
    """A constant of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.route(x) + self.shared(x * torch.ones(HIDDEN))


@pytest.mark.parametrize(
    "kind", [Depends, Overwrites, Jitters, Decides, Twice, TwoArguments, Makes]
)
def test_what_cannot_be_moved_stays_as_it_is(kind: type[Base]) -> None:
    mixture = kind()
    before = set(vars(mixture))
    assert overlapped_forward(mixture, "experts") is None
    assert set(vars(mixture)) == before and mixture.training


def test_only_mixtures_with_other_work_are_rewritten() -> None:
    mixture = Added()
    forward = overlapped_forward(mixture, "experts")
    assert forward is not None
    x = torch.randn(2, 3, HIDDEN)
    assert torch.equal(forward(mixture, x), mixture(x))
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=8, num_local_experts=EXPERTS)
    assert overlapped_forward(MixtralSparseMoeBlock(config), "experts") is None


def test_rows_without_a_batch_run_as_written() -> None:
    module = nn.ModuleDict({"mlp": Added()})
    overlap_exchange(module, PLAN)
    assert type(module["mlp"]) is not Added and isinstance(module["mlp"], Added)
    x = torch.randn(3, HIDDEN)
    expected = module["mlp"].route(x) + module["mlp"].shared(x)
    assert torch.equal(module["mlp"](x), expected)


def halve(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A hook that changes the tokens of the experts, and with them whether they were sent
    already."""
    return args[0] * 0.5, *args[1:]


def hooked(block: str, overlap: bool, node_size: int | None) -> tuple[list[Tensor], int]:
    """Output and gradients of two calls with the hook, and how many exchanges of hidden states were
    not waited for."""
    mlp, under_way = make(block, overlap=overlap, node_size=node_size), []
    mlp.experts.register_forward_pre_hook(halve)
    with exchanges(lambda: under_way.append(1), lambda: under_way.append(-1)):
        run(mlp)
        mlp.zero_grad()
        return run(mlp), sum(under_way)


@pytest.mark.parametrize(("block", "node_size"), [("deepseek", None), ("qwen", 1)])
def test_a_hook_may_change_what_was_sent(block: str, node_size: int | None) -> None:
    """The numbers are those without overlap, and nothing stays under way."""
    for (found, left), (expected, _) in zip(
        run_ranks(hooked, 2, block, True, node_size),
        run_ranks(hooked, 2, block, False, node_size),
        strict=True,
    ):
        assert left == 0
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


class Own(Qwen2MoeSparseMoeBlock):
    """A mixture of a user's own."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Counting(Own):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


class WithoutAutocast(Own):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def own(kind: type[Own]) -> nn.Module:
    return kind(Qwen2MoeConfig(**SIZES, num_experts=EXPERTS, shared_expert_intermediate_size=12))


@pytest.mark.parametrize("kind", [Counting, WithoutAutocast])
def test_a_forward_that_does_more_than_compute_stays_as_it_is(kind: type[Own]) -> None:
    mixture = own(kind)
    assert overlapped_forward(mixture, "experts") is None
    assert "calls" not in vars(mixture)


def test_a_mixture_is_called_by_the_name_of_its_own_argument() -> None:
    module = nn.ModuleDict({"mlp": own(Own)})
    module["mlp"].experts.config._experts_implementation = "eager"
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    hidden = torch.randn(1, TOKENS, HIDDEN)
    expected = module["mlp"](x=hidden)
    overlap_exchange(module, PLAN)
    assert type(module["mlp"]) is not Own
    assert torch.equal(module["mlp"](x=hidden), expected)
