"""The memory of a traced step on CPU is that of all tensors that are alive at its peak, against a
count of its own."""

from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from memory import LiveBytes as Independent
from parity import Rows, quiet_trainer
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d.parallel import host_channel
from lightning_3d.tracing.memory import LiveBytes

ROWS, TOKENS, STEPS = 4, 96, 3


class Causal(pl.LightningModule):
    """A Llama whose activations, weights and gradients need about as much memory as each other."""

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 67,
        }
        self.model = LlamaForCausalLM(
            LlamaConfig(
                **sizes, num_hidden_layers=4, use_cache=False, max_position_embeddings=TOKENS
            )
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Watch(pl.Callback):
    """Remembers, of each step, the peak of what is alive on this rank, and what the trace says."""

    def __init__(self, live: Independent) -> None:
        self.live, self.steps = live, []  # type: ignore[var-annotated]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.live.reset()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        peak, trace = self.live.peak, trainer.strategy.last_step.trace
        self.steps.append((peak, trace.ranks[trainer.global_rank].memory))


def watched(layout: str, options: dict[str, Any]) -> list[tuple[int, Any]]:
    from lightning_3d.strategy import Lightning3DStrategy

    strategy = Lightning3DStrategy(
        layout, micro_batch_size=2, trace_every_n_steps=1, self_check="never", **options
    )
    live = Independent()
    watch = Watch(live)
    rows = Rows({"input_ids": torch.randint(67, (8 * STEPS, TOKENS))})
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=STEPS, callbacks=[watch])
    # The independent count has memory that several ranks map, too, through which ranks of one host
    # send messages.
    with patch.object(host_channel, "connect", return_value=None), live:
        trainer.fit(Causal(), DataLoader(rows, batch_size=ROWS))
    return watch.steps


CELLS = {
    "recomputed": ("dp2", {"zero_stage": 1, "recompute": "full"}),
    "zero 2": ("dp2", {"zero_stage": 2}),
    "zero 3": ("dp2", {"zero_stage": 3}),
    "sequence parallel": ("tp2", {"zero_stage": 0, "sequence_parallel": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_a_traced_step_has_what_is_alive_at_its_peak(cell: str) -> None:
    for rank, steps in enumerate(run_ranks(watched, 2, *CELLS[cell], process_group=False)):
        for step, (alive, memory) in enumerate(steps):
            print(f"rank {rank}, step {step}: {alive} bytes, traced {memory.total}: {memory}")
        assert [memory.total for _, memory in steps[1:]] == [
            pytest.approx(alive, rel=0.02) for alive, _ in steps[1:]
        ]


def test_what_is_alive_is_counted_once_and_until_it_is_freed() -> None:
    live = LiveBytes()
    weight, shrunk = torch.ones(100), torch.ones(300)
    live.hold([weight, weight.view(10, 10)])
    live.hold([shrunk], resized=True)
    assert live.peak == 4 * 400
    shrunk.untyped_storage().resize_(0)  # no operation says so
    with live:
        first = weight * 2
        view = first.view(10, 10).t()
        assert live.peak == 4 * 400, "held before, and more than what is alive now"
        del first
        more = view + torch.zeros(10, 10)
        assert view.is_contiguous() is False and more.numel() == 100
        large = torch.empty(500)
        assert live.peak == 4 * (100 + 100 + 100 + 500)
        del large, more, view
        again = torch.empty(200)
        torch.from_numpy(again.numpy()).add_(1)  # memory of its own has been counted
    assert live.peak == 4 * 800


@pytest.mark.slow
def test_what_a_step_compiles_runs_compiled_while_it_is_watched() -> None:
    def step(x: Tensor) -> Tensor:
        return (x.sin() * x).cos().sum(-1)

    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    x, expected = torch.randn(64, 256), None
    with LiveBytes() as live:
        live.hold([x])
        expected = torch.compile(step, backend=backend, fullgraph=True)(x)
    assert len(graphs) == 1 and torch.equal(expected, step(x))
    assert 4 * 64 * 256 <= live.peak <= 4 * 4 * 64 * 256 + 4096


def test_a_recomputed_block_counts_while_it_is_recomputed() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64))
    x = torch.randn(32, 64, requires_grad=True)
    peaks = []
    for run in (lambda: net(x), lambda: checkpoint(net, x, use_reentrant=False)):
        live = LiveBytes()
        live.hold(net.parameters())
        before = live.peak
        with live:
            run().sum().backward()
        peaks.append(live.peak - before)
        net.zero_grad()
    assert peaks[1] >= 4 * 32 * 1024 * 2, "input and output of the activation"
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05), (
        "one block: recomputation frees nothing at the peak"
    )
