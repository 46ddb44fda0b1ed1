"""A logger whose disk is full ends no fit, and its other errors are shown."""

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from parity import Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from torch.utils.data import DataLoader

from lightning_3d.strategy import Lightning3DStrategy
from lightning_3d.strategy.surviving_loggers import survive_loggers


class OnFullDisk(CSVLogger):
    def save(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fit(folder: str) -> tuple[int, int]:
    recipe = Recipe(layers=2, steps=3, global_batch=4)
    strategy = Lightning3DStrategy("dp2", micro_batch_size=2)
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_steps=3, logger=OnFullDisk(folder), log_every_n_steps=1
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Module(recipe), DataLoader(Rows(data(recipe)), batch_size=2))
    return trainer.global_step, sum("training continues" in str(one.message) for one in caught)


def test_a_full_disk_of_a_logger_is_one_warning(tmp_path: Path) -> None:
    assert run_ranks(fit, 2, str(tmp_path), process_group=False) == [(3, 1), (3, 0)]


def test_other_errors_of_a_logger_are_raised(tmp_path: Path) -> None:
    class Wrong(CSVLogger):
        def save(self) -> None:
            raise ValueError("not a number")

    logger: Any = Wrong(tmp_path)
    survive_loggers([logger])
    survive_loggers([logger])
    logger.log_metrics({"loss": torch.tensor(1.0)}, 1)
    with pytest.raises(ValueError, match="not a number"):
        logger.save()
