"""The same unmodified LightningModule under four strategies, each on 4 CPU ranks: `python
benchmarks/strategies.py`.

The module is that of `examples/own_trainer.py`. For each strategy it prints how many parameters
each rank holds after 3 steps, or the error that ended the fit. Ranks are compared by a digest of
their weights.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
RANKS, STEPS, SECONDS = 4, 3, 600
RESULT = re.compile(r"RESULT (\d+) parameters, digest ([\d.e+-]+)")


def strategies() -> dict[str, Callable[[], Any]]:
    """A factory for each strategy, by name."""
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

    from lightning_3d import Lightning3DStrategy

    return {
        "Lightning3DStrategy": lambda: Lightning3DStrategy("tp2_pp2"),
        "DeepSpeedStrategy": lambda: DeepSpeedStrategy(stage=2),
        "FSDPStrategy": FSDPStrategy,
        "ModelParallelStrategy": lambda: ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=2
        ),
    }


def fit(name: str) -> None:
    """Train on each rank, and print what this rank holds. Run in processes of its own."""
    sys.path.insert(0, str(EXAMPLES))
    from lightning.pytorch import Trainer, seed_everything
    from own_trainer import CountingText, LanguageModel
    from torch.utils.data import DataLoader

    seed_everything(0)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategies()[name](), max_steps=STEPS, **quiet
    )  # type: ignore[arg-type]
    module = LanguageModel()
    trainer.fit(module, DataLoader(CountingText(), batch_size=8))
    held = list(module.parameters())
    digest = sum(float(parameter.detach().double().abs().sum()) for parameter in held)
    sys.stdout.write(
        f"RESULT {sum(parameter.numel() for parameter in held)} parameters, digest {digest:.12e}\n"
    )
    sys.stdout.flush()


def outcome(name: str) -> str:
    """What became of a fit, in one line."""
    done = subprocess.run(
        [sys.executable, __file__, "--fit", name],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    found = RESULT.findall(done.stdout)
    if done.returncode:
        errors = re.findall(r"^[\w.]*(?:Error|Exception): .*", done.stderr, re.MULTILINE)
        return f"failed: {errors[-1] if errors else f'exit code {done.returncode}'}"
    sizes = sorted({int(size) for size, _ in found})
    return (
        f"trained; parameters on a rank: {sizes[0]:,} to {sizes[-1]:,}; distinct weights among"
        f" ranks: {len({d for _, d in found})}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fit:
        fit(options.fit)
        return
    for name in strategies():
        print(f"{name:24} {outcome(name)}", flush=True)


if __name__ == "__main__":
    main()
