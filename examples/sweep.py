"""Compare two layouts and two learning rates for a small model, in a sweep of four runs on 2 CPU
ranks each.

    python examples/sweep.py
    python examples/sweep.py parallelism=tp2,pp2,dp2 optimizer.lr=3e-3 trainer.max_steps=50

It runs one command, `lightning-3d train -m ...`, and reads its table. `sweep.html` in the sweep's
folder shows the results.
"""

import csv
import sys
from datetime import datetime
from pathlib import Path

from lightning_3d.app.cli import main as lightning_3d

SWEPT = ["parallelism=pp2,dp2", "optimizer.lr=1e-3,1e-2"]
SMALL = [
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=64",
    "model.config.head_dim=8",
    "model.config.intermediate_size=128",
    "data.sequence_length=64",
    "data.global_batch_size=8",
    "parallelism.micro_batch_size=2",
    "trainer.max_steps=10",
    "trainer.limit_val_batches=2",
    "trainer.trace_every_n_steps=5",
    "cluster=local_cpu",
]


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    folder = Path("outputs") / f"sweep_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    code = lightning_3d(["train", "-m", *SMALL, *(arguments or SWEPT), f"hydra.sweep.dir={folder}"])
    if code:
        return code
    with (folder / "sweep.csv").open() as file:
        jobs = [row for row in csv.DictReader(file) if row["status"] == "finished"]
    best = min(jobs, key=lambda job: float(job["val_loss"]))
    fastest = max(jobs, key=lambda job: float(job["tokens_per_second"]))
    print(
        f"smallest validation loss: {float(best['val_loss']):.4f} by job {best['job']}, layout"
        f" {best['layout']}"
    )
    print(
        f"fastest: {float(fastest['tokens_per_second']):,.0f} tokens/s by job {fastest['job']},"
        f" layout {fastest['layout']}"
    )
    print(f"to look at: {folder / 'sweep.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
