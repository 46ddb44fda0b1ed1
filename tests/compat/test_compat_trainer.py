"""Contract tests for what `compat.lightning_trainer` uses of Lightning's Trainer and torch's
DataLoader."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from starts import in_fresh_process
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_3d.compat.lightning_trainer import intercept_trainers, watch_samples


def test_trainers_are_intercepted_once() -> None:
    assert in_fresh_process(intercepted) == (7, ["7 kept"])


def intercepted() -> tuple[int, list[str]]:
    """In a process of its own, because it changes the class."""
    seen: list[str] = []

    def before(given: dict[str, Any]) -> tuple[dict[str, Any], str]:
        return given | {"max_steps": 7}, "kept"

    for _ in range(2):
        intercept_trainers(before, lambda trainer, kept: seen.append(f"{trainer.max_steps} {kept}"))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False
    )
    return trainer.max_steps, seen


def test_samples_of_a_loader_are_known() -> None:
    before = _BaseDataLoaderIter._next_index
    try:
        samples = watch_samples()
        samples = watch_samples()
        loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
        assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3], [4, 5]]
        assert [samples(loader, index) for index in range(4)] == [[0, 1], [2, 3], [4, 5], None]
        assert samples([1, 2], 0) is None
    finally:
        _BaseDataLoaderIter._next_index = before  # type: ignore[method-assign]
