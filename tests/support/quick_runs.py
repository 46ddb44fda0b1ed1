"""Command lines of the smallest run that trains, and the losses that such a run records."""

import csv
from pathlib import Path

QUICK = [
    "parallelism=dp2",
    "parallelism.micro_batch_size=2",
    "trainer.max_steps=2",
    "data.sequence_length=32",
    "data.global_batch_size=4",
    "data.val_sequences=4",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.head_dim=4",
]
FAULTY = ["+callbacks.faulty._target_=faulty.FailAtStep", "+callbacks.faulty.rank=1"]


def losses(run: Path) -> list[str]:
    with (run / "metrics.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file)]
