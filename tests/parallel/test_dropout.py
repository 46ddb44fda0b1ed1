"""Dropout draws what (seed, step, micro-batch, layer, region) says: equal on replicas, different on
shards, replayed by recomputation.
"""

from collections.abc import Callable

import models
import pytest
import sharded
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_3d.parallel.random_streams import RandomState, may_use_dropout

DRAWS = 20_000
RATE = 0.1


def kept(set_state: Callable[[], None]) -> Tensor:
    """Which of DRAWS entries a dropout keeps after `set_state`."""
    set_state()
    return F.dropout(torch.ones(DRAWS), RATE) != 0


def streams() -> dict[str, Tensor]:
    """One mask for each thing on which the stream depends, changed one at a time."""

    def at(
        seed: int = 1, step: int = 3, micro_batch: int = 5, name: str = "h.2.q", tp_rank: int = 0
    ) -> Callable[[], None]:
        def set_state() -> None:
            state = RandomState(seed, tp_rank=tp_rank)
            state.begin(step, micro_batch)
            state.inside(name).start()

        return set_state

    def outside(move: Callable[[RandomState], None]) -> Callable[[], None]:
        def set_state() -> None:
            state = RandomState(1)
            state.begin(3, 5)
            move(state)

        return set_state

    return {
        "base": kept(at()),
        "seed": kept(at(seed=2)),
        "step": kept(at(step=4)),
        "micro_batch": kept(at(micro_batch=6)),
        "region": kept(at(name="h.3.q")),
        "tp_rank": kept(at(tp_rank=1)),
        "before_blocks": kept(outside(lambda state: None)),
        "block_2": kept(outside(lambda state: state.layer(2))),
        "block_3": kept(outside(lambda state: state.layer(3))),
        "after_region": kept(outside(lambda state: state.outside("h.2.o").start())),
        "same_name_outside": kept(outside(lambda state: state.outside("h.2.q").start())),
    }


def test_each_stream_keeps_the_right_share() -> None:
    for name, mask in streams().items():
        # Five standard deviations of a binomial.
        assert (
            abs(mask.float().mean().item() - (1 - RATE)) < 5 * (RATE * (1 - RATE) / DRAWS) ** 0.5
        ), name


def test_streams_are_independent_of_each_other() -> None:
    masks = streams()
    names = list(masks)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            correlation = torch.corrcoef(
                torch.stack([masks[first].float(), masks[second].float()])
            )[0, 1].item()
            assert abs(correlation) < 5 / DRAWS**0.5, (first, second)


def test_the_same_place_draws_the_same_numbers_again() -> None:
    first, again = streams(), streams()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_replicated_streams_do_not_depend_on_the_rank() -> None:
    def after(tp_rank: int) -> Tensor:
        state = RandomState(1, tp_rank=tp_rank)
        state.begin(0, 0)
        state.inside("q").start()
        torch.rand(tp_rank + 3)
        state.outside("o").start()
        outside = torch.rand(5)
        torch.rand(tp_rank + 3)
        state.layer(2)
        return torch.cat([outside, torch.rand(5)])

    assert torch.equal(after(0), after(1))


def test_disabled_streams_touch_nothing() -> None:
    state = RandomState(1, enabled=False)
    before = torch.get_rng_state()
    state.begin(0, 0)
    state.layer(1)
    state.inside("q").start()
    state.outside("o").start()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_leaves_no_trace_in_the_random_state() -> None:
    before = torch.get_rng_state()
    state = RandomState(1)
    with state.isolated():
        state.begin(0, 0)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.2)


class Quiet(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(Quiet(), nn.Dropout(0.0)), False),
        (nn.Sequential(Quiet(), nn.Dropout(0.1)), True),
        (Functional(), True),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.1), True),
    ],
)
def test_dropout_is_found_in_layers_and_in_code(module: nn.Module, expected: bool) -> None:
    assert may_use_dropout(module) == expected


@pytest.mark.parametrize("name", models.FAMILIES)
def test_dropout_of_a_transformers_model_is_known_from_its_settings(name: str) -> None:
    model = models.build(name, 1)
    assert not may_use_dropout(model)
    assert RandomState.for_model(model, seed=0).enabled is False
    model.config.attention_dropout = 0.1
    assert may_use_dropout(model)


def noisy(family: str) -> nn.Module:
    """A model with dropout inside regions, and for GPT-NeoX on residuals too."""
    torch.manual_seed(0)
    common = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "attention_dropout": 0.1,
        "use_cache": False,
    }
    if family == "gpt_neox":
        return GPTNeoXForCausalLM(
            GPTNeoXConfig(hidden_dropout=0.1, max_position_embeddings=32, **common)
        )
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **common))


def train_noisy(family: str) -> dict[tuple[str, tuple[int, ...]], Tensor]:
    """Four steps of two micro-batches; weights that other ranks hold too, by name and holders."""
    model = noisy(family).train()
    state = RandomState.for_model(model, seed=7, tp_rank=dist.get_rank())
    _, specs = sharded.cut(model, random=state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 67, (8, 2, 12), generator=torch.Generator().manual_seed(1))
    for step in range(4):
        for index in (0, 1):
            state.begin(step, index)
            ids = tokens[2 * step + index]
            sharded.loss_of(model(input_ids=ids).logits, ids).backward()
        for name, gradient in sharded.summed_gradients(model, specs).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    weights = model.named_parameters()
    return {
        (name, specs[name].tp_replicas): value.detach()
        for name, value in weights
        if len(specs[name].tp_replicas) > 1
    }


@pytest.mark.parametrize(("family", "tp"), [("llama", 2), ("llama", 4), ("gpt_neox", 2)])
def test_tensor_parallel_replicas_stay_equal_bit_by_bit(family: str, tp: int) -> None:
    weights = run_ranks(train_noisy, tp, family)
    compared = 0
    for rank, table in enumerate(weights):
        for (name, replicas), value in table.items():
            first = weights[min(replicas)][name, replicas]
            assert torch.equal(value, first), name
            compared += rank != min(replicas)
    assert compared > 0


def masks_inside_attention() -> tuple[Tensor, Tensor]:
    """What attention dropout keeps in two layers on this rank, seen through uniform attention over
    ones."""
    seen: list[Tensor] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(4, 512, bias=False), nn.Linear(512, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            inside = F.dropout(self.q(x).abs() + 1.0, 0.1)
            seen.append(inside != 0)
            return F.dropout(self.o(inside), 0.1)

    torch.manual_seed(0)
    model = nn.Sequential(Watched(), Watched())
    state = RandomState.for_model(model, seed=3, tp_rank=dist.get_rank())
    sharded.cut(model, {"tp": {"*.q": "colwise", "*.o": "rowwise"}}, state)
    state.begin(0, 0)
    model(torch.ones(64, 4))
    return seen[0], seen[1]


def test_shards_and_layers_drop_independently_at_the_right_rate() -> None:
    masks = [mask for pair in run_ranks(masks_inside_attention, 2) for mask in pair]
    size = masks[0].numel()
    for index, mask in enumerate(masks):
        assert abs(mask.float().mean().item() - 0.9) < 5 * (0.09 / size) ** 0.5
        for other in masks[index + 1 :]:
            both = torch.stack([mask.flatten().float(), other.flatten().float()])
            assert abs(torch.corrcoef(both)[0, 1].item()) < 5 / size**0.5


def recomputed_gradients() -> float:
    """Difference of all gradients with and without recomputation, for two micro-batches whose
    backwards come in another order.
    """
    gradients = []
    tokens = torch.randint(0, 67, (2, 2, 12), generator=torch.Generator().manual_seed(1))
    for recompute in (False, True):
        model = noisy("gpt_neox").train()
        state = RandomState.for_model(model, seed=7, tp_rank=dist.get_rank())
        sharded.cut(model, random=state)
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = []
        for index in (0, 1):
            state.begin(0, index)
            losses.append(sharded.loss_of(model(input_ids=tokens[index]).logits, tokens[index]))
        for index in (0, 1):
            state.begin(0, index)  # as the engine does before a backward
            losses[index].backward()
        gradients.append([sharded.gradient_of(parameter) for parameter in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))


def test_recomputation_draws_the_same_numbers() -> None:
    assert run_ranks(recomputed_gradients, 2) == [0.0, 0.0]
