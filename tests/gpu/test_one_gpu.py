"""What only a real GPU shows on one rank: waits of the host, the memory of a loss in chunks,
kernels that Triton writes."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_ranks
import lightning.pytorch as pl
import parity
import pytest
import torch
import torch.nn.functional as F
from parity import Cell
from reference import Recipe

STEPS = 5
WAIT = "called a synchronizing CUDA operation"


def waits(recipe: Recipe, **strategy: Any) -> Counter[str]:
    """How often the host waits for the GPU in the last step until the optimizer is launched, by the
    line that makes it wait; "torch" where Python does not know."""
    found: Counter[str] = Counter()

    class LastStep(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            torch.cuda.set_sync_debug_mode(
                "warn" if trainer.global_step == STEPS - 1 else "default"
            )

    def note(message: Any, category: Any, filename: str, line: int, *args: Any) -> None:
        if WAIT in str(message):
            found[f"{Path(filename).name}:{line}"] += 1

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), _errors() as printed:
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", note)
        made = parity.quiet_trainer
        patch.setattr(
            parity,
            "quiet_trainer",
            lambda **more: made(**more | {"callbacks": [*more["callbacks"], LastStep()]}),
        )
        parity.fit_on_rank(
            recipe, parity.Rows(parity.data(recipe)), FusedModule(recipe), **strategy
        )
        found["torch"] += printed.read_text().count(WAIT)
    return found


@contextmanager
def _errors() -> Iterator[Path]:
    """A file with what is written to the standard error stream inside."""
    with tempfile.NamedTemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield Path(file.name)
        finally:
            os.dup2(before, 2)
            os.close(before)


class Launched(torch.optim.AdamW):
    """After it is launched, waits are no longer counted: the host reads the loss and the norm of
    the step then."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        torch.cuda.set_sync_debug_mode("default")
        return result


class FusedModule(parity.Module):
    """Its optimizer decides on the GPU whether a step is taken."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Launched(self.parameters(), lr=self.recipe.learning_rate, fused=True)


@pytest.mark.parametrize(
    "options", [{}, {"recompute": "full"}, {"recompute": "selective"}, {"loss_chunks": 4}], ids=str
)
def test_the_host_does_not_wait_before_the_optimizer_is_launched(options: dict[str, Any]) -> None:
    cell = Cell()
    recipe = dataclasses.replace(cell.recipe, steps=STEPS)
    [found] = gpu_ranks.run(waits, 1, recipe, **parity.strategy_arguments(cell) | options)
    assert not any(found.values()), found


@pytest.mark.parametrize("model", ["llama", "qwen2", "mixtral", "gpt_neox"])
def test_one_rank(model: str) -> None:
    gpu_ranks.check(Cell(model, dtype="float64"))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", ["llama", "gemma3", "gpt_neox"])
def test_compiled(model: str, recompute: str) -> None:
    """Kernels of Triton, in float32."""
    gpu_ranks.check(Cell(model), compile=True, recompute=recompute)


def test_compiled_on_two_ranks() -> None:
    gpu_ranks.check(Cell(tp=2), compile=True)
    gpu_ranks.check(Cell("qwen2_moe", dp=2, ep=2), compile=True)


def chunked_and_whole(
    vocabulary: int, hidden: int, tokens: int
) -> dict[str, tuple[float, float, float]]:
    """Of the loss in chunks and of the plain one, in bf16: largest relative error against float32,
    bytes at most, milliseconds."""
    from lightning_3d.parallel.deferred_logits import deferred, summed_loss

    generator = torch.Generator("cuda").manual_seed(0)
    inside = (
        torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16().requires_grad_()
    )
    weight = (
        (torch.randn(vocabulary, hidden, device="cuda", generator=generator) * hidden**-0.5)
        .bfloat16()
        .requires_grad_()
    )
    labels = torch.randint(vocabulary, (tokens,), device="cuda", generator=generator)

    def of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="none")

    def whole(inside: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(inside, weight).float(), labels, reduction="sum")

    def chunked(inside: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return summed_loss(deferred(inside, weight, None, "auto"), labels, of_tokens)

    exact = [x.detach().float().requires_grad_() for x in (inside, weight)]
    whole(*exact).backward()
    wanted = [x.grad for x in exact]
    del exact
    results = {}
    for name, loss in {"whole": whole, "chunked": chunked}.items():
        milliseconds = []
        for _ in range(8):
            inside.grad = weight.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            loss(inside, weight).backward()
            end.record()
            torch.cuda.synchronize()
            milliseconds.append(start.elapsed_time(end))
            peak = torch.cuda.max_memory_allocated() - before
        errors = [
            ((x.grad.float() - y).norm() / y.norm()).item()
            for x, y in zip((inside, weight), wanted, strict=True)
        ]
        results[name] = (max(errors), float(peak), sorted(milliseconds[2:])[3])
    return results


def test_a_loss_in_chunks_takes_an_eighth_of_the_logits() -> None:
    """At a vocabulary of 128k. Beside the chunks it keeps the gradient of the weight in float32."""
    vocabulary, hidden, tokens = 128_256, 4096, 8192
    [found] = gpu_ranks.run(chunked_and_whole, 1, vocabulary, hidden, tokens)
    print(found)
    weights = vocabulary * hidden * (4 + 2 + 2)
    assert found["chunked"][1] - weights <= (found["whole"][1] - vocabulary * hidden * 2) / 8 * 1.1
    assert found["chunked"][0] <= 1.1 * found["whole"][0] + 1e-3


def documents_alone_and_masked(attention: str) -> float:
    """Largest difference of logits between packed documents under a mask, and each document
    alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, **sizes, attn_implementation=attention)
    ).cuda()
    lengths = (100, 17, 139)
    tokens = torch.randint(128, (1, sum(lengths)), device="cuda")
    positions = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation("eager")
    alone = torch.cat(
        [model(input_ids=part, use_cache=False).logits for part in tokens.split(lengths, 1)], 1
    )
    return ((packed - alone).abs().max() / alone.abs().max()).item()


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_documents_see_themselves_only(attention: str) -> None:
    [found] = gpu_ranks.run(documents_alone_and_masked, 1, attention)
    assert found < 1e-4, found


class Wide(parity.Module):
    """Its heads have the 16 elements that flex_attention needs at least."""

    attention = "flex_attention"

    def configure_model(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        if self.model is None:
            sizes = {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "vocab_size": 67,
            }
            more = {
                "num_key_value_heads": 2,
                "tie_word_embeddings": False,
                "attn_implementation": self.attention,
            }
            self.model = LlamaForCausalLM(LlamaConfig(**sizes, **more))


class Sdpa(Wide):
    attention = "sdpa"


def wide(recipe: Recipe, module: type[Wide], **strategy: Any) -> list[float]:
    return parity.fit_on_rank(
        recipe, parity.Rows(parity.data(recipe)), module(recipe), **strategy
    ).losses


@pytest.mark.parametrize("cell", [Cell(), Cell(tp=2), Cell(pp=2)], ids=lambda cell: cell.name)
def test_flex_attention_trains(cell: Cell) -> None:
    """As the fused attention does."""
    ranks, strategy = cell.world_size, parity.strategy_arguments(cell)
    [expected] = gpu_ranks.run(wide, 1, cell.recipe, Sdpa, **parity.strategy_arguments(Cell()))
    for found in gpu_ranks.run(
        wide, ranks, cell.recipe, Wide, nodes=gpu_ranks.nodes(ranks), **strategy
    ):
        assert found == pytest.approx(expected, rel=1e-4)


def dropout(recipe: Recipe, **strategy: Any) -> list[float]:
    """Losses of a run with dropout in the attention."""

    class Dropped(parity.Module):
        def configure_model(self) -> None:
            super().configure_model()
            for module in self.model.modules():  # type: ignore[union-attr]
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.1

    return parity.fit_on_rank(
        recipe, parity.Rows(parity.data(recipe)), Dropped(recipe), **strategy
    ).losses


def test_tensor_parallel_ranks_drop_alike() -> None:
    """In bf16, where the fused kernel drops. The losses of both ranks are one, and near those
    without dropout."""
    cell = dataclasses.replace(Cell(tp=2), dtype="bfloat16")
    first, second = gpu_ranks.run(
        dropout, 2, cell.recipe, nodes=gpu_ranks.nodes(2), **parity.strategy_arguments(cell)
    )
    expected = gpu_ranks.one_process(Cell().recipe)[0].losses
    assert first == second
    assert first == pytest.approx(expected, rel=0.05) and first != expected
