"""Losses that are computed in chunks, from logits that are computed only then."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from composed_configs import dry
from memory import LiveBytes
from parity import Cell
from ranks import run_ranks
from reference import reference
from sweeps import by_default
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_3d.app.planner.advice import job_of, machine_of
from lightning_3d.app.planner.block_costs import work_of
from lightning_3d.app.planner.memory import memory_of
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.layout import loss_chunks
from lightning_3d.layout.loss_chunks import count_chunks, count_products, rows_of_parts
from lightning_3d.options.loss import LossOptions
from lightning_3d.parallel.deferred_logits import (
    DeferredLogits,
    computing_what_is_kept,
    defer_heads,
    deferred,
    summed_loss,
)
from lightning_3d.parallel.tensor import loss
from lightning_3d.parallel.tensor.group import TensorParallel
from lightning_3d.parallel.tensor.logits import VocabParallelLogits
from lightning_3d.parallel.tensor.loss import summed_losses

ROWS, TOKENS, HIDDEN, VOCABULARY = 2, 9, 6, 23


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)


def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return plain(logits, labels) + 1e-2 * torch.logsumexp(logits, -1).square() * (labels != -100)


def inputs(
    dtype: torch.dtype = torch.float64, *, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = (
        torch.randn(ROWS, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    offset = (
        torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        if bias
        else None
    )
    labels = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
    labels[0, 2] = labels[1, 5] = -100
    return hidden, weight, offset, labels


def alone(logits: Tensor) -> Tensor:
    return logits


def capped(logits: Tensor) -> Tensor:
    """As Gemma 2: a soft cap, and the type of a loss."""
    return (
        (torch.tanh(logits / 3.0) * 3.0).float()
        if logits.dtype == torch.bfloat16
        else torch.tanh(logits / 3.0) * 3.0
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunks", [2, 5, 18])
@pytest.mark.parametrize("follow", [lambda logits: logits, capped], ids=["alone", "capped"])
@pytest.mark.parametrize("loss_of_tokens", [plain, smoothed, with_z_loss])
def test_loss_and_gradients_are_those_of_all_logits(
    loss_of_tokens: Any, follow: Any, chunks: int, bias: bool
) -> None:
    hidden, weight, offset, labels = inputs(bias=bias)
    trained = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    whole = follow(F.linear(hidden, weight, offset)).reshape(-1, VOCABULARY)
    expected = loss_of_tokens(whole, labels.reshape(-1)).sum()
    wanted = torch.autograd.grad(0.3 * expected, trained)
    logits = follow(deferred(hidden, weight, offset, chunks))
    assert isinstance(logits, DeferredLogits)
    total = summed_loss(logits, labels, loss_of_tokens)
    assert total.item() == pytest.approx(expected.item(), rel=1e-13)
    for found, one in zip(torch.autograd.grad(0.3 * total, trained), wanted, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-12, atol=1e-13)


def test_in_16_bits_the_gradient_of_the_weight_is_added_up_in_32() -> None:
    """It is as close to the exact one as that of all logits at once."""
    hidden, weight, offset, labels = inputs()
    exact = torch.autograd.grad(_loss_of_all(hidden, weight, offset, labels), weight)[0]
    hidden, weight, offset, labels = inputs(torch.bfloat16)
    at_once = torch.autograd.grad(_loss_of_all(hidden, weight, offset, labels), weight)[0]
    in_chunks = torch.autograd.grad(
        summed_losses(deferred(hidden, weight, offset, 18), labels), weight
    )[0]
    assert in_chunks.dtype == torch.bfloat16
    errors = [(one.double() - exact).abs().max().item() for one in (in_chunks, at_once)]
    assert errors[0] < 1.5 * errors[1], errors


def _loss_of_all(hidden: Tensor, weight: Tensor, offset: Tensor | None, labels: Tensor) -> Tensor:
    return summed_losses(F.linear(hidden, weight, offset), labels)


def test_frozen_heads_and_evaluation_compute_no_gradient_of_the_weight() -> None:
    hidden, weight, _, labels = inputs(bias=False)
    weight.requires_grad_(False)
    expected = torch.autograd.grad(_loss_of_all(hidden, weight, None, labels), hidden)[0]
    loss = summed_losses(deferred(hidden, weight, None, 4), labels)
    torch.testing.assert_close(
        torch.autograd.grad(loss, hidden)[0], expected, rtol=1e-12, atol=1e-13
    )
    with torch.no_grad():
        assert not summed_losses(deferred(hidden, weight, None, 4), labels).requires_grad


def test_inference_mode_and_autocast() -> None:
    hidden, weight, _, labels = inputs(torch.float32, bias=False)
    with torch.inference_mode():
        found, expected = (
            summed_losses(deferred(hidden, weight, None, 4), labels),
            _loss_of_all(hidden, weight, None, labels),
        )
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        logits = deferred(hidden, weight, None, 4)
        assert logits.dtype == torch.bfloat16
        found, expected = summed_losses(logits, labels), _loss_of_all(hidden, weight, None, labels)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(
        torch.autograd.grad(found, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        assert one.dtype == torch.float32 and (one - other).abs().max() < 1e-2 * other.abs().max()


def test_logits_that_are_read_are_those_of_the_head() -> None:
    hidden, weight, offset, _ = inputs()
    whole, logits = F.linear(hidden, weight, offset), deferred(hidden, weight, offset, 3)
    assert (logits.shape, logits.dtype, logits.device, logits.requires_grad) == (
        whole.shape,
        whole.dtype,
        whole.device,
        True,
    )
    assert logits.float().dtype == torch.float32 and (logits * 2).dtype == torch.float64
    assert torch.equal(logits.argmax(-1), whole.argmax(-1)) and torch.equal(
        (2 * logits)[:, -1], 2 * whole[:, -1]
    )
    assert torch.equal(logits.detach(), whole.detach()) and not logits.detach().requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(logits.square().sum(), weight)[0],
        torch.autograd.grad(whole.square().sum(), weight)[0],
    )


def test_a_change_of_the_logits_is_seen() -> None:
    hidden, weight, offset, labels = inputs()
    with torch.no_grad():
        changed = F.linear(hidden, weight, offset)
        changed.view(-1)[:VOCABULARY] = 0.0
        through_a_view, in_place = (
            deferred(hidden, weight, offset, 3),
            deferred(hidden, weight, offset, 3),
        )
        through_a_view.view(-1)[:VOCABULARY] = 0.0
        in_place[0, 0] = 0.0
        for logits in (through_a_view, in_place):
            assert summed_losses(logits, labels).item() == pytest.approx(
                summed_losses(changed, labels).item(), rel=1e-13
            )
        assert torch.equal(
            deferred(hidden, weight, offset, 3).clone().mul_(2),
            2 * F.linear(hidden, weight, offset),
        )


def test_logits_without_gradients_stay_without() -> None:
    """A reference whose logits are read later, in a loss of one's own."""
    hidden, weight, offset, labels = inputs()
    with torch.no_grad():
        logits = deferred(hidden, weight, offset, 3)
        doubled = 2 * logits
    assert not logits.requires_grad and not doubled.softmax(-1).requires_grad
    assert not summed_losses(deferred(hidden, weight, offset, 3).detach(), labels).requires_grad
    with torch.no_grad():
        other = deferred(hidden, weight, offset, 3)
    assert not summed_losses(other, labels).requires_grad


def test_logits_that_something_holds_are_computed_before_the_weight_changes() -> None:
    hidden, weight, offset, _ = inputs()
    whole, held = F.linear(hidden, weight, offset).detach().clone(), {}
    with computing_what_is_kept():
        held["logits"] = deferred(hidden, weight, offset, 3)
        dropped = deferred(hidden, weight, offset, 3)
        del dropped
    with torch.no_grad():
        weight.fill_(float("nan"))
    assert torch.equal(held["logits"].detach(), whole)


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, offset, labels = inputs()
    loss = summed_losses(deferred(hidden, weight, offset, 3), labels)
    with pytest.raises(
        PlanError, match="gradients that have no derivatives themselves. Use loss_chunks=1"
    ):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_the_factor_of_a_loss_is_not_rounded_to_16_bits() -> None:
    hidden, weight, offset, labels = inputs(torch.bfloat16)
    loss = summed_losses(deferred(hidden, weight, offset, 3), labels)
    one = torch.autograd.grad(loss, hidden, retain_graph=True)[0].float()
    large = torch.autograd.grad(8191.0 * loss, hidden)[0].float()
    assert (large / one).nanmean().item() == pytest.approx(8191.0, rel=2e-4)


def test_ranks_with_uneven_shards_of_the_vocabulary_compute_as_many_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_chunks, "LARGE_CHUNK", 16 * 17 * 4)
    hidden = torch.zeros(32, 1)
    counts = [
        deferred(hidden, torch.zeros(columns, 1), None, "auto", columns=17) for columns in (17, 16)
    ]
    assert counts[0].rows == counts[1].rows == rows_of_parts(2, 32, 17, 4, on_cpu=True)
    assert deferred(hidden, torch.zeros(8, 1), None, "auto").shape == (32, 8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_an_eighth_of_the_logits_of_a_large_vocabulary_is_in_memory(
    dtype: torch.dtype,
) -> None:
    tokens, columns = 256, 128_256
    assert count_chunks("auto", 8192, columns, 4096, dtype.itemsize) == 8
    whole, chunked = (
        peak_bytes(alone, LossOptions(), dtype, chunks, tokens=tokens, columns=columns)
        for chunks in (1, 8)
    )
    assert whole >= 12 * tokens * columns
    assert chunked <= whole / 8 + 2 * 2 * columns * 4, (
        "and the gradient of the weight: its sum, and what is added to it"
    )


def peak_bytes(
    follow: Any,
    terms: LossOptions,
    dtype: torch.dtype,
    chunks: int,
    sizes: tuple[int, ...] | None = None,
    *,
    tokens: int = 64,
    columns: int = 4096,
) -> int:
    """Most bytes of all tensors of head and loss, forward and backward, without those of the
    inputs.

    Args:
        sizes: columns of each rank, if tensor-parallel ranks share the vocabulary.
    """
    columns = columns if sizes is None else sizes[dist.get_rank()]
    hidden, weight = (
        torch.ones(rows, 2, dtype=dtype, requires_grad=True) for rows in (tokens, columns)
    )
    labels = torch.arange(tokens)
    with LiveBytes() as live:
        for given in (labels, hidden, weight):
            given.detach().add_(0)  # seen
        live.reset()
        before = live.now
        logits = follow(deferred(hidden, weight, None, chunks))
        if sizes is not None:
            logits = VocabParallelLogits(
                logits, sizes, TensorParallel(dist.group.WORLD, len(sizes), dist.get_rank())
            )  # type: ignore[arg-type]
        loss = summed_losses(logits, labels, terms=terms)
        del logits  # as the output of a model, before the backward
        loss.backward()
    return live.peak - before


OF_WEIGHT = 2 * 4096 * 2 * 4
"""Bytes of the gradient of the weight: its sum, and what is added to it."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "terms",
    [LossOptions(), LossOptions(label_smoothing=0.1), LossOptions(z_loss=1e-3)],
    ids=["plain", "smoothed", "z-loss"],
)
@pytest.mark.parametrize("follow", [alone, capped])
def test_all_tensors_of_the_loss_need_an_eighth(
    follow: Any, terms: LossOptions, dtype: torch.dtype
) -> None:
    whole, chunked = (peak_bytes(follow, terms, dtype, chunks) for chunks in (1, 8))
    assert whole >= 12 * 64 * 4096
    assert chunked <= whole / 8 + OF_WEIGHT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("chunks", [2, 3, 4, 6, 16])
def test_so_many_chunks_need_that_part_of_the_memory(chunks: int, dtype: torch.dtype) -> None:
    whole, chunked = (
        peak_bytes(alone, LossOptions(), dtype, asked, tokens=192) for asked in (1, chunks)
    )
    assert chunked <= whole / chunks + OF_WEIGHT * (2 if dtype == torch.float64 else 1)


def test_all_tensors_of_the_loss_of_a_sharded_vocabulary_need_an_eighth() -> None:
    for terms in (LossOptions(), LossOptions(label_smoothing=0.1, z_loss=1e-3)):
        found = [
            run_ranks(peak_bytes, 2, alone, terms, torch.bfloat16, chunks, (2048, 2048))
            for chunks in (1, 8)
        ]
        assert all(
            chunked <= whole / 8 + OF_WEIGHT / 2 for whole, chunked in zip(*found, strict=True)
        )


def test_the_number_of_chunks() -> None:
    assert [count_chunks("auto", tokens, 32_000, 64, 2) for tokens in (0, 1, 512, 1024, 8192)] == [
        1,
        1,
        1,
        2,
        8,
    ]
    assert [count_chunks(4, tokens, 32_000, 16_384, 2) for tokens in (0, 1, 3, 100)] == [1, 1, 3, 4]


@pytest.mark.parametrize(("width", "counts"), [(2, [8, 4, 1]), (4, [8, 8, 1])])
def test_auto_saves_more_than_the_gradient_of_the_weight_takes(
    width: int, counts: list[int]
) -> None:
    """In 16 bits, 4 chunks are one product, whose result is not added up in float32."""
    assert [
        count_chunks("auto", 8192, 128_256, hidden, width) for hidden in (4096, 16_384, 32_768)
    ] == counts
    assert count_products(4, 2) == 1


def test_few_products_and_many_pieces() -> None:
    """Each product is added to the gradient of the weight, which is the cost of chunks."""
    assert [count_products(8, width) for width in (2, 4, 8)] == [2, 4, 4]
    assert [count_products(chunks, 2) for chunks in (2, 3, 4, 5, 9)] == [1, 1, 1, 2, 3]
    assert rows_of_parts(8, 8192, 128_256, 2, on_cpu=False) == (4096, 341)
    assert rows_of_parts(8, 8192, 128_256, 2, on_cpu=True) == (4096, 32), "4 million logits"
    assert rows_of_parts(5, 5, 10, 8, on_cpu=False) == (2, 1)


def test_one_product_in_16_bits_is_the_gradient_of_the_weight() -> None:
    hidden, weight, offset, labels = inputs(torch.bfloat16)
    at_once = torch.autograd.grad(_loss_of_all(hidden, weight, offset, labels), weight)[0]
    hidden, weight, offset, labels = inputs(torch.bfloat16)
    assert count_products(3, 2) == 1
    assert torch.equal(
        torch.autograd.grad(summed_losses(deferred(hidden, weight, offset, 3), labels), weight)[0],
        at_once,
    )


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "many"])
def test_what_is_no_number_of_chunks_is_refused(wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match="loss_chunks must be auto or a whole number of at least 1"
    ):
        dry("parallelism=dp8", f"parallelism.loss_chunks={wrong}")


def test_heads_of_other_kinds_stay_as_they_are() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1.0

    class Model(nn.Module):
        def __init__(self, head: nn.Module) -> None:
            super().__init__()
            self.head = head

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    own, usual = Model(Own(4, 5)), Model(nn.Linear(4, 5))
    assert [defer_heads(model, 2) for model in (own, usual, nn.Linear(2, 2))] == [
        False,
        True,
        False,
    ]
    assert type(own.head) is Own and isinstance(usual.head(torch.ones(3, 4)), DeferredLogits)
    assert defer_heads(nn.ModuleDict({"model": usual}), 1)  # by a second strategy
    assert type(usual.head(torch.ones(3, 4))) is Tensor


def test_the_planner_counts_the_logits_of_one_chunk() -> None:
    data = ("data=tokens", "data.sequence_length=8192", "data.global_batch_size=64")
    words = ("parallelism=dp8", "model=llama3_1_8b", "cluster=h100_1x8", *data)
    memory = []
    for chunks in (1, "auto"):
        _, plan = dry(
            *words,
            f"parallelism.loss_chunks={chunks}",
            "parallelism.micro_batch_size=1",
            "force=true",
        )
        memory.append(
            memory_of(job_of(plan.run, "bf16", plan.layout, plan.schedule, plan.micro_batch_size))
        )
    assert memory[0].loss == 12 * 8192 * 128_256
    # its sum in float32, and then either the logits of a chunk or the copy in 16 bits
    weight = 4096 * 128_256
    assert memory[1].loss == 4 * weight + max(memory[0].loss / 8, 2 * weight) + 2 * 8192 * 4096, (
        "and the gradients of hidden states"
    )


def test_chunks_need_no_more_operations_but_the_planner_counts_the_sums_of_their_gradients() -> (
    None
):
    hidden, weight = (torch.randn(rows, 8, requires_grad=True) for rows in (12, 40))
    counts = []
    for chunks in (1, 3):
        with FlopCounterMode(display=False) as counter:
            summed_losses(deferred(hidden, weight, None, chunks), torch.arange(12)).backward()
        counts.append(counter.get_total_flops())
    assert counts == [3 * 2 * 12 * 8 * 40] * 2
    data = (
        "data=tokens",
        "data.sequence_length=8192",
        "data.global_batch_size=64",
        "parallelism.micro_batch_size=1",
        "force=true",
    )
    heads = []
    for chunks in (1, "auto"):
        _, plan = dry(
            "parallelism=dp8",
            "model=llama3_1_8b",
            "cluster=h100_1x8",
            *data,
            f"parallelism.loss_chunks={chunks}",
        )
        machine = machine_of(plan.run.cluster)
        assert machine is not None
        heads.append(
            work_of(
                job_of(plan.run, "bf16", plan.layout, plan.schedule, plan.micro_batch_size), machine
            ).head
        )
    # 2 products in bf16 are written and read, and a float32 sum is read and written
    moved = 2 * (2 + 2 + 4 + 4) * 4096 * 128_256
    assert heads[1].forward - heads[0].forward == pytest.approx(moved / machine.memory_rate)
    assert heads[1].backward == heads[0].backward


@pytest.mark.parametrize(
    ("chunks", "precision", "moved"), [(4, "bf16", 0), (4, "fp32", 8), (2, "fp32", 0)]
)
def test_one_product_less_is_added_to_float32_than_there_are(
    chunks: int, precision: str, moved: int
) -> None:
    data = (
        "data=tokens",
        "data.sequence_length=8192",
        "data.global_batch_size=64",
        "parallelism.micro_batch_size=1",
        "force=true",
    )
    heads, memory = [], []
    for asked in (1, chunks):
        _, plan = dry(
            "parallelism=dp8",
            "model=llama3_1_8b",
            "cluster=h100_1x8",
            *data,
            f"parallelism.loss_chunks={asked}",
        )
        machine = machine_of(plan.run.cluster)
        assert machine is not None
        job = job_of(plan.run, precision, plan.layout, plan.schedule, plan.micro_batch_size)
        heads.append(work_of(job, machine).head)
        memory.append(memory_of(job).loss)
    weight, logits, width = 4096 * 128_256, 8192 * 128_256, 2 if precision == "bf16" else 4
    assert heads[1].forward - heads[0].forward == pytest.approx(
        moved * weight / machine.memory_rate, abs=1e-9
    )
    # no sum in float32: the logits of the pieces, or at last their gradient with that of the weight
    if moved == 0:
        assert memory[1] == width * 8192 * 4096 + max(memory[0] / chunks, width * (weight + logits))


LAYOUTS = [
    Cell(dp=2, dtype="float64"),
    Cell(tp=2, pp=2, dtype="float64"),
    Cell(tp=2, cp=2, dtype="float64"),
    Cell("gemma3", pp=2, dp=2, schedule="ZBVZeroBubble", dtype="float64"),
    Cell(tp=2, dp=2, zero=3),
    Cell(cp=2, dtype="float64", options=(("cp_kind", "ulysses"),)),
    Cell("qwen2", pp=2, dp=2, schedule="Interleaved1F1B", dtype="float64"),  # tied embeddings
    Cell("llama", pp=2, schedule="GPipe", dtype="float64"),
]


def train_and_count(*args: Any, **options: Any) -> tuple[parity.Part, int]:
    """Train as the strategy does. Returns also how often this rank computed a loss in chunks."""
    calls = []

    def counted(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return summed_loss(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "summed_loss", counted)
        return parity.train_on_rank(*args, **options), len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("cell", by_default(LAYOUTS, 1, 3), ids=lambda cell: cell.name)
def test_layouts_train_as_one_process_does(cell: Cell) -> None:
    expected, noise = reference(cell.recipe)
    options = {**parity.strategy_arguments(cell), "loss_chunks": 3}
    results = run_ranks(train_and_count, cell.world_size, cell.recipe, **options, timeout=180)
    error, drift = parity.differences([part for part, _ in results], expected)
    assert drift == 0.0 and error.within(parity.limits(cell.dtype, noise)), (drift, error)
    with_head = [count for _, count in results if count]
    assert len(with_head) == cell.world_size // cell.pp and min(with_head) >= cell.recipe.steps, (
        "each rank with the head, in each step"
    )
