"""Embedding, logits and loss that are cut by vocabulary behave like whole ones."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import sharded
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import recording
from ranks import run_ranks
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_3d.errors import DataError, PlanError
from lightning_3d.parallel.sharding import even_range
from lightning_3d.parallel.tensor import (
    TensorParallel,
    VocabParallelLogits,
    token_losses,
    vocab_parallel_cross_entropy,
)
from lightning_3d.parallel.tensor.layers import VocabParallelEmbedding

VOCABULARY = 11
ROWS, LENGTH = 3, 7


def full_logits(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(ROWS, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits.to(dtype)


def labels() -> Tensor:
    """Some of them ignored, every rank's columns hit."""
    targets = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % VOCABULARY
    targets[0, :3] = -100
    return targets


def shard(full: Tensor) -> tuple[Tensor, int]:
    start, length = even_range(VOCABULARY, dist.get_world_size(), dist.get_rank())
    return full[..., start : start + length].contiguous(), start


def wrapped(full: Tensor) -> tuple[VocabParallelLogits, Tensor]:
    """Logits as a head returns them, and the leaf below."""
    leaf = shard(full)[0].requires_grad_()
    size, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    sizes = [even_range(VOCABULARY, size, rank)[1] for rank in range(size)]
    return (
        VocabParallelLogits(leaf * 1.0, sizes, TensorParallel(group, size, dist.get_rank())),
        leaf,
    )


def check_cross_entropy(dtype: torch.dtype, close: float) -> list[str]:
    full = full_logits(dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    expected = F.cross_entropy(
        full.to(wide).flatten(0, 1), labels().flatten(), reduction="none"
    ).view(ROWS, LENGTH)
    weights = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(1)).to(wide)
    (expected * weights).sum().backward()
    local, start = shard(full.detach())
    local.requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    with recording() as recorder:
        losses = vocab_parallel_cross_entropy(local, labels(), start, group)
        (losses * weights).sum().backward()
    assert losses.dtype == wide
    assert torch.allclose(losses, expected, rtol=close, atol=close)
    assert local.grad.dtype == dtype
    assert torch.allclose(local.grad, shard(full.grad)[0], rtol=close, atol=close)
    assert all(call.numel == 2 * ROWS * LENGTH for call in recorder.calls)
    return [call.name for call in recorder.calls]


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_cross_entropy_equals_the_one_of_full_logits_with_two_small_all_reduces(
    dtype: torch.dtype, close: float, tp: int
) -> None:
    assert run_ranks(check_cross_entropy, tp, dtype, close) == [["all_reduce"] * 2] * tp


def loss_of_an_impossible_label() -> tuple[str, float]:
    targets = labels()
    ignored = token_losses(wrapped(full_logits())[0], targets)[0, 0].item()
    targets[1, 1] = VOCABULARY
    try:
        token_losses(wrapped(full_logits())[0], targets)
    except DataError as error:
        return str(error), ignored
    return "", ignored


def test_a_label_outside_the_vocabulary_is_refused_and_an_ignored_one_costs_nothing() -> None:
    for message, ignored in run_ranks(loss_of_an_impossible_label, 2):
        assert f"The label {VOCABULARY} at position [1, 1]" in message
        assert ignored == 0.0


def test_losses_of_plain_logits_need_no_group() -> None:
    logits = full_logits()
    expected = F.cross_entropy(logits.flatten(0, 1), labels().flatten(), reduction="none").view(
        ROWS, LENGTH
    )
    assert torch.equal(token_losses(logits, labels()), expected)
    assert token_losses(logits.to(torch.bfloat16), labels()).dtype == torch.float32


def metadata() -> dict[str, Any]:
    logits, _ = wrapped(full_logits())
    with recording() as recorder:
        out = CausalLMOutputWithPast(logits=logits)
        answers = {
            "shape": tuple(out.logits.shape),
            "size": out.logits.size(-1),
            "dim": out.logits.dim(),
            "len": len(out.logits),
            "numel": out.logits.numel(),
            "dtype": out.logits.dtype,
            "device": out.logits.device.type,
            "requires_grad": out.logits.requires_grad,
            "same": out["logits"] is logits and out[0] is logits and isinstance(logits, Tensor),
            "text": "VocabParallelLogits(shape=(3, 7, 11)" in repr(logits),
        }
    return answers | {"calls": len(recorder.calls)}


def test_sizes_and_types_are_those_of_the_whole_without_communication() -> None:
    for answers in run_ranks(metadata, 2):
        assert answers == {
            "shape": (ROWS, LENGTH, VOCABULARY),
            "size": VOCABULARY,
            "dim": 3,
            "len": ROWS,
            "numel": ROWS * LENGTH * VOCABULARY,
            "dtype": torch.float64,
            "device": "cpu",
            "requires_grad": True,
            "same": True,
            "text": True,
            "calls": 0,
        }


# What a user may do with logits -> whether it stays on the shards.
USES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "scale": (lambda x: 2.0 * (x / 3.0) + 1.0 - 0.5, True),
    "softcap": (lambda x: torch.tanh(x / 30.0) * 30.0, True),
    "cast": (lambda x: x.float().to(torch.float64), True),
    "detach": (lambda x: x.detach(), True),
    "clone": (lambda x: x.clone().contiguous(), True),
    "buffer": (lambda x: x * torch.tensor(2.0, dtype=torch.float64), True),
    "shift": (lambda x: x[:, :-1], True),
    "ellipsis": (lambda x: x[..., :-1, :], True),
    "last": (lambda x: x[:, -1], True),
    "mask": (lambda x: x[labels() != -100], True),
    "view": (lambda x: x.view(-1, VOCABULARY), True),
    "reshape": (lambda x: x[:, :-1].reshape(-1, x.size(-1)), True),
    "flatten": (lambda x: x.flatten(0, 1), True),
    "regroup": (lambda x: x.view(ROWS * LENGTH, -1), True),
    "loss": (lambda x: F.cross_entropy(x.view(-1, x.size(-1)), labels().view(-1)), True),
    "loss_sum": (
        lambda x: F.cross_entropy(x.flatten(0, 1), labels().flatten(), reduction="sum"),
        True,
    ),
    "column": (lambda x: x[..., 3], False),
    "columns": (lambda x: x[:, :, 2:9], False),
    "merge": (lambda x: x.flatten(), False),
    "narrow_view": (lambda x: x.view(ROWS, -1), False),
    "softmax": (lambda x: x.softmax(-1), False),
    "argmax": (lambda x: x.argmax(-1), False),
    "top": (lambda x: x.topk(3).values, False),
    "sum": (lambda x: x.sum(-1), False),
    "vector": (lambda x: x * torch.arange(VOCABULARY), False),
    "trained_scale": (lambda x: x * nn.Parameter(torch.tensor(2.0, dtype=torch.float64)), False),
    "stack": (lambda x: torch.stack([x, x]), False),
    "swap": (lambda x: x.transpose(1, 2), False),
    "smoothed": (
        lambda x: F.cross_entropy(x.flatten(0, 1), labels().flatten(), label_smoothing=0.1),
        False,
    ),
    "third_axis": (lambda x: F.cross_entropy(x.transpose(1, 2), labels()), False),
    "numpy": (lambda x: torch.from_numpy(x.detach().numpy()), False),
    "where": (lambda x: torch.where(x > 0, x, 0.0), False),
    "masked": (lambda x: x.masked_fill(x < 0, 0.0), False),
}


def use(name: str) -> tuple[bool, list[str]]:
    """Compare values and gradients with plain logits; whether it stayed on the shards, and what was
    called forward."""
    function, _ = USES[name]
    plain = full_logits().requires_grad_()
    expected = function(plain)
    logits, leaf = wrapped(full_logits())
    with recording() as forward:
        got = function(logits)
    calls = [call.name for call in forward.calls]
    value = got.full() if isinstance(got, VocabParallelLogits) else got
    assert tuple(got.shape) == tuple(expected.shape), name
    assert got.dtype == expected.dtype, name
    assert torch.allclose(value, expected, rtol=0, atol=1e-6 if name == "cast" else 1e-13), name
    assert got.requires_grad == expected.requires_grad, name
    if expected.requires_grad:
        (value * value).sum().backward()
        (expected * expected).sum().backward()
        assert torch.allclose(
            leaf.grad, shard(plain.grad)[0], rtol=1e-6 if name == "cast" else 1e-12
        ), name
    return "all_gather_into_tensor" not in calls, calls


def use_all() -> dict[str, tuple[bool, list[str]]]:
    return {name: use(name) for name in USES}


def test_logits_can_be_used_like_whole_ones() -> None:
    for used in run_ranks(use_all, 2):
        for name, (stays, calls) in used.items():
            assert stays == USES[name][1], name
            assert stays or calls == ["all_gather_into_tensor"], name


def read_twice() -> tuple[int, bool]:
    logits, _ = wrapped(full_logits())
    with recording() as recorder:
        first, second = logits.argmax(-1), logits.max(-1).indices
    return len(recorder.calls), torch.equal(first, second)


def test_logits_are_gathered_once_however_often_they_are_read() -> None:
    assert run_ranks(read_twice, 2) == [(1, True)] * 2


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "setitem": lambda x: x.__setitem__((slice(None), 0), 0.0),
    "method": lambda x: x.masked_fill_(x.detach() > 0, 0.0),
    "operator": lambda x: x.__imul__(2.0),
    "attribute": lambda x: setattr(x, "data", torch.zeros(1)),
    "out": lambda x: torch.exp(x, out=torch.empty(ROWS, LENGTH, VOCABULARY, dtype=torch.float64)),
}


def refusals() -> list[str]:
    """The messages of all changes."""
    messages = []
    for change in CHANGES.values():
        with pytest.raises(PlanError) as refused:
            change(wrapped(full_logits())[0].detach())
        messages.append(str(refused.value))
    return messages


def test_changing_logits_in_place_is_refused() -> None:
    assert all(
        "in place" in message and "masked_fill" in message for message in run_ranks(refusals, 1)[0]
    )


def transformers_loss() -> tuple[float, list[str]]:
    """The loss function of Transformers, as it is, works on shards."""
    model, ids = sharded.build("llama", torch.float32), sharded.batch("llama")
    expected = model(input_ids=ids, labels=ids).loss.item()
    sharded.cut(model)
    with recording() as recorder:
        out = model(input_ids=ids, labels=ids)
    return abs(out.loss.item() - expected), [call.name for call in recorder.calls]


def test_the_loss_of_transformers_never_gathers() -> None:
    for difference, calls in run_ranks(transformers_loss, 2):
        assert difference < 1e-6
        assert set(calls) == {"all_reduce"}


def look_up(token: int) -> Tensor:
    """An embedding with one row more on the first rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    start, rows = even_range(VOCABULARY, size, rank)
    embedding = nn.Embedding(VOCABULARY, 4, dtype=torch.float64)
    embedding.weight = nn.Parameter(
        torch.arange(4.0 * VOCABULARY).view(VOCABULARY, 4)[start : start + rows]
    )
    embedding.__class__ = VocabParallelEmbedding
    group: Any = dist.group.WORLD
    embedding.tp_context, embedding.tp_start = TensorParallel(group, size, rank), start
    return embedding(torch.tensor([[token]])).detach()


def look_up_all() -> list[list[float]]:
    return [look_up(token).flatten().tolist() for token in range(VOCABULARY)]


def test_f16_a_vocabulary_that_tp_does_not_divide_is_cut_unevenly() -> None:
    expected = torch.arange(4.0 * VOCABULARY).view(VOCABULARY, 4).tolist()
    assert run_ranks(look_up_all, 2) == [expected] * 2


def look_up_nothing() -> list[bool]:
    answers = []
    for token in (VOCABULARY, VOCABULARY + 5, -1):
        try:
            look_up(token)
        except IndexError:
            answers.append(True)
    return answers


def test_an_id_outside_the_vocabulary_raises_on_every_rank() -> None:
    assert run_ranks(look_up_nothing, 2) == [[True] * 3] * 2


def padded_rows() -> Tensor:
    """Gradient of the embedding with a padding id on the second rank."""
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 4, padding_idx=8, dtype=torch.float64),
        nn.Linear(4, 4, dtype=torch.float64),
    )
    _, specs = sharded.cut(model, {"tp": {"0": "embedding_rowwise"}})
    model(torch.arange(VOCABULARY)).sum().backward()
    full = torch.zeros(VOCABULARY, 4, dtype=torch.float64)
    specs["0.weight"].paste(model[0].weight.grad, full)
    return full


def test_the_padding_id_has_no_gradient_wherever_it_lies() -> None:
    total = sum(run_ranks(padded_rows, 2))
    assert (total.abs().sum(-1) == 0).nonzero().flatten().tolist() == [8]


def test_vocabularies_of_the_suite_are_awkward_on_purpose() -> None:
    assert any(models.vocabulary(name) % 4 for name in models.MODELS)
