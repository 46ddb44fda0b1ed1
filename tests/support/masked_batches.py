"""Batches with masks and positions, and ranks on a CPU that answer questions about them as ranks on
a GPU do."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from models import IGNORE, Batch

from lightning_3d.engine.step.known_values import KnownValues

MASKS = ("none", "ones", "right", "left", "packed")


def with_mask(batch: Batch, kind: str) -> Batch:
    """The batch with an `attention_mask`: of ones, or with padding in each row on the "right" or
    "left"; or with the `position_ids` of "packed" documents; or with "none". Shapes (rows,
    sequence)."""
    rows, length = batch["input_ids"].shape
    places = torch.arange(length).expand(rows, -1)
    sizes = 3 + torch.arange(rows).unsqueeze(1) % 5
    if kind == "none":
        return batch
    if kind == "packed":
        return batch | {"position_ids": torch.where(places < sizes, places, places - sizes)}
    mask = {"ones": places >= 0, "right": places < length - sizes, "left": places >= sizes}[kind]
    return batch | {"attention_mask": mask.long(), "labels": batch["labels"].where(mask, IGNORE)}


@contextmanager
def known_on_cpu() -> Iterator[None]:
    """Let models that are built here know values as on a GPU. On a CPU nothing is gained by it, so
    by default it is off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightning_3d.engine.build.KnownValues",
            lambda device, wanted: KnownValues(device, wanted=True),
        )
        yield
