"""One rank of `checkpoint_stall.py`: a fit that saves, whose steps are timed, and a load."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d.strategy import Lightning3DStrategy

WARMUP = 3
SEQUENCE = 256
_QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("ranks", "threads", "saves", "between", "tokens", "hidden", "layers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--synchronous", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    options.result.write_text(json.dumps(Benchmark(options).run()))


class Benchmark:
    """The fits of one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.total = WARMUP + options.saves * options.between
        self.config = model_config(options.hidden, options.layers)
        self.rows = options.tokens // SEQUENCE
        shape = (self.total * self.rows * options.ranks, SEQUENCE)
        self.tokens = torch.randint(
            self.config.vocab_size, shape, generator=torch.Generator().manual_seed(1)
        )

    def run(self) -> dict[str, Any]:
        """The seconds of each step and, if saves are synchronous, of the parts of a load."""
        watch = Watch(self.options.folder / "checkpoints", self.total, self.options.between)
        module, _ = self._fit(
            self.total, [watch], checkpoint_asynchronous=not self.options.synchronous
        )
        result: dict[str, Any] = {
            "steps": watch.steps,
            "state_bytes": 3 * 4 * sum(p.numel() for p in module.parameters()),
        }
        if self.options.synchronous:
            assert watch.path is not None
            result["load"] = self._load(watch.path)
        return result

    def _load(self, path: Path) -> dict[str, float]:
        seconds = {}
        for verify in (True, False):
            uncache(path)
            _, strategy = self._fit(
                self.total - self.options.between, [], path, checkpoint_verify=verify
            )
            seconds |= (
                strategy.seconds if verify else {"read_unverified": sum(strategy.seconds.values())}
            )
        return seconds

    def _fit(
        self, steps: int, callbacks: list[pl.Callback], path: Path | None = None, **given: Any
    ) -> tuple[Module, TimedStrategy]:
        ranks = self.options.ranks
        strategy = TimedStrategy(
            f"dp{ranks}", micro_batch_size=1, zero_stage=int(ranks > 1), **given
        )
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=strategy,
            max_steps=steps,
            callbacks=callbacks,
            **_QUIET,
        )
        module = Module(self.config)
        trainer.fit(
            module, DataLoader(TensorDataset(self.tokens), batch_size=self.rows), ckpt_path=path
        )
        return module, strategy


def model_config(hidden: int, layers: int) -> LlamaConfig:
    """A Llama with heads of 64 and 16 times as many tokens as it is wide."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": layers,
        "vocab_size": 16 * hidden,
    }
    heads = {
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": SEQUENCE,
    }
    return LlamaConfig(**sizes, **heads, use_cache=False)


class Module(pl.LightningModule):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = LlamaForCausalLM(self.config)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Watch(pl.Callback):
    """Times every step, and saves after some."""

    def __init__(self, folder: Path, total: int, between: int) -> None:
        self.folder, self.total, self.between = folder, total, between
        self.steps: list[dict[str, Any]] = []
        self.last = time.perf_counter()
        self.waited = no_core()
        self.call = 0.0
        self.path: Path | None = None
        self.written = True

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        done, step, waited = time.perf_counter(), trainer.global_step, no_core()
        writing = self.path is not None and (self.call > 0 or not self.written)
        if step > WARMUP:
            taken = {
                "seconds": done - self.last,
                "no_core": waited - self.waited,
                "save_call": self.call,
            }
            self.steps.append({**taken, "saved": self.call > 0, "quiet": not writing})
        self.written = self.path is not None and self.path.exists()
        self.last, self.waited, self.call = done, waited, 0.0
        if WARMUP <= step < self.total and (step - WARMUP) % self.between == 0:
            self.path = self.folder / f"{step}.ckpt"
            trainer.save_checkpoint(self.path)
            self.call = time.perf_counter() - done


class TimedStrategy(Lightning3DStrategy):
    """Says how long the parts of a load took."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.seconds = {"verify": 0.0, "read": 0.0}

    def load_checkpoint(self, *args: Any, **given: Any) -> Any:
        return self._add("verify", super().load_checkpoint, *args, **given)

    def load_model_state_dict(self, *args: Any, **given: Any) -> Any:
        return self._add("read", super().load_model_state_dict, *args, **given)

    def load_optimizer_state_dict(self, *args: Any, **given: Any) -> Any:
        return self._add("read", super().load_optimizer_state_dict, *args, **given)

    def _add(self, part: str, load: Callable[..., Any], *args: Any, **given: Any) -> Any:
        torch.distributed.barrier()
        started = time.perf_counter()
        result = load(*args, **given)
        self.seconds[part] += time.perf_counter() - started
        return result


def no_core() -> float:
    """Seconds that this thread has waited for a core so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def uncache(folder: Path) -> None:
    """What is read next comes from the disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
