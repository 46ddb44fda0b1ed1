"""Sequence parallelism: blocks work on parts of the sequence, and compute what they compute on one
process."""

from typing import Any

import models
import parity
import pytest
import sharded
import torch
from counting import recording
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.tensor import find_regions, resolve

FAMILIES = (*models.FAMILIES, *models.OTHERS)
# norms of Transformers round to float32 whatever the type; each rank rounds its own part
FLOAT32_INSIDE = 3e-6


def assert_equal_to_one_process(name: str, tp: int, length: int = models.SEQUENCE) -> None:
    whole = sharded.run_whole(name, length=length)
    results = run_ranks(sharded.run_cut, tp, name, length=length, sequence=True)
    for result in results:
        assert result.loss == pytest.approx(whole.loss, abs=1e-12)
        assert torch.allclose(result.logits, whole.logits, rtol=0, atol=1e-12)
    for parameter, expected in whole.gradients.items():
        got = sharded.pasted(results, parameter)
        scale = expected.abs().max().clamp(min=1e-3)
        assert ((got - expected).abs().max() / scale) < FLOAT32_INSIDE, parameter


ON_FOUR = ("llama", "gpt_neox", "gemma3", "phi3", "deepseek_v3_dense")
CASES = [(name, tp) for name in FAMILIES for tp in (2, 4)]


@pytest.mark.parametrize(
    ("name", "tp"),
    by_default(CASES, *(CASES.index(case) for case in CASES if case[1] == 2 or case[0] in ON_FOUR)),
)
def test_loss_logits_and_every_gradient_equal_one_process(name: str, tp: int) -> None:
    assert_equal_to_one_process(name, tp)


@pytest.mark.parametrize("length", [1, 3, 13])
def test_a_sequence_that_the_ranks_do_not_divide_is_filled_up(length: int) -> None:
    if length > 1:
        assert_equal_to_one_process("llama", 4, length)
    else:
        whole, results = sharded_logits(length), run_ranks(cut_logits, 4, length)
        assert all(torch.allclose(logits, whole, rtol=0, atol=1e-12) for logits in results)


def sharded_logits(length: int) -> Tensor:
    return sharded.logits_of(sharded.build("llama"), sharded.batch("llama", length)).detach()


def cut_logits(length: int) -> Tensor:
    model = sharded.build("llama")
    sharded.cut(model, sequence=True)
    with torch.no_grad():
        return sharded.logits_of(model, sharded.batch("llama", length)).full()


def count_collectives(name: str, layers: int, **how: Any) -> dict[str, list[tuple[str, int]]]:
    model, ids = sharded.build(name, layers=layers), sharded.batch(name)
    sharded.cut(model, sharded.user_plan(name), sequence=True)
    if how.get("frozen"):
        model.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(True)
    counted = {}
    with recording() as forward:
        logits = sharded.logits_of(model, ids)
    loss = sharded.loss_of(logits, ids)
    with recording() as backward:
        loss.backward()
    for part, recorder in (("forward", forward), ("backward", backward)):
        counted[part] = [(call.name, call.numel) for call in recorder.calls]
    return counted


GATHER, SCATTER, SUM = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


@pytest.mark.parametrize(
    ("name", "tp"),
    [("llama", 2), ("llama", 4), ("qwen2", 2), ("gpt_neox", 2), ("gemma3", 4), ("phi3", 2)],
)
def test_a_block_gathers_twice_and_scatters_twice_each_way(name: str, tp: int) -> None:
    """And gathers its two inputs again in the backward. The ends cost a gather each way; embedding
    and head an all-reduce each."""
    layers = 3
    counted = run_ranks(count_collectives, tp, name, layers)[0]
    hidden = sharded.build(name).config.hidden_size
    whole = 3 * models.SEQUENCE * hidden
    assert sorted(counted["forward"]) == sorted(
        [(GATHER, whole // tp)] * (2 * layers + 1)
        + [(SCATTER, whole)] * 2 * layers
        + [(SUM, whole)]
    )
    assert sorted(counted["backward"]) == sorted(
        [(GATHER, whole // tp)] * (2 * layers + 1 + 2 * layers)
        + [(SCATTER, whole)] * 2 * layers
        + [(SUM, whole)]
    )


def test_frozen_layers_gather_nothing_again() -> None:
    counted = run_ranks(count_collectives, 2, "llama", 2, frozen=True)[0]
    assert [name for name, _ in counted["backward"]].count(GATHER) == 2 * 2 + 1


def saved_by_blocks(sequence: bool) -> int:
    """Bytes that the forward of the blocks leaves for the backward, without parameters and
    positions."""
    model = sharded.build("llama")
    sharded.cut(model, sequence=sequence)
    core: Any = model.model  # type: ignore[union-attr]
    hidden = torch.randn(3, models.SEQUENCE, 32, dtype=torch.float64, requires_grad=True)
    positions = core.rotary_emb(hidden, torch.arange(models.SEQUENCE)[None])
    others = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *positions, hidden)
    }
    kept: dict[int, torch.UntypedStorage] = {}  # holds them, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in others:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in core.layers:
            hidden = block(hidden, position_embeddings=positions)
        return sum(storage.nbytes() for storage in kept.values())


def test_what_a_block_keeps_between_its_regions_is_a_part_of_the_sequence() -> None:
    """At least the inputs of attention and MLP, of each of two blocks, shrink to a quarter on four
    ranks, of float64."""
    whole, dealt = run_ranks(saved_by_blocks, 4, False)[0], run_ranks(saved_by_blocks, 4, True)[0]
    inputs = 2 * 2 * 3 * models.SEQUENCE * 32 * 8
    assert whole - dealt >= inputs * 3 / 4


PARITY: list[dict[str, Any]] = [
    {"layout": "tp2_pp2_dp2", "zero": 1},
    {"layout": "tp4_pp2", "schedule": "ZBVZeroBubble"},
    {"layout": "tp2_pp2_dp2", "zero": 3, "recompute": "full"},
    {"layout": "tp2_dp2", "recompute": "selective", "zero": 2},
    {"layout": "tp2_pp2", "offload_activations": True},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", by_default(PARITY, 3, 4), ids=lambda mode: "-".join(map(str, mode.values()))
)
def test_training_equals_one_process(mode: dict[str, Any]) -> None:
    parity.assert_same_training("llama", sequence_parallel=True, **mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    by_default([("qwen3", "tp4_pp2"), ("phi3", "tp2_dp2"), ("gpt_neox", "tp2_pp2_dp2")], 1),
)
def test_without_it_training_equals_one_process(model: str, layout: str) -> None:
    parity.assert_same_training(model, layout, sequence_parallel=False)


class Mixer(nn.Module):
    """Mixes tokens, and is in no plan."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3, padding=1)


def test_blocks_that_may_mix_tokens_are_named() -> None:
    model = sharded.build("llama")
    plan = read_plan(model, None)
    model.model.layers[1].mixer = Mixer()
    with pytest.raises(PlanError, match=r"'model.layers.1.mixer' \(Mixer\) is not sharded"):
        find_regions(model, plan, resolve(model, plan, 2))


def test_layers_directly_in_a_block_are_named() -> None:
    model = models.PlainModel(2)
    plan = read_plan(model, model.plan)
    with pytest.raises(PlanError, match="block 'blocks.0' contains sharded layers directly"):
        find_regions(model, plan, resolve(model, plan, 2))


def ask_for_hidden_states(how: str) -> str:
    model = sharded.build("llama")
    sharded.cut(model, sequence=True)
    if how == "config":
        model.config.output_hidden_states = True
    with pytest.raises(PlanError, match="sequence_parallel=False") as refusal:
        model(sharded.batch("llama"), **({} if how == "config" else {"output_hidden_states": True}))
    return str(refusal.value)


@pytest.mark.parametrize("how", ["config", "argument"])
def test_hidden_states_between_blocks_are_refused(how: str) -> None:
    assert "parts of sequences" in run_ranks(ask_for_hidden_states, 2, how)[0]
