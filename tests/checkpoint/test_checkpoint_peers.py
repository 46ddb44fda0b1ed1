"""A rank that is lost in a save: those that know it do not wait for those that do not."""

from pathlib import Path

import pytest
from plain_checkpoints import save

from lightning_3d.checkpoint import CheckpointStore, SaveMode, store
from lightning_3d.checkpoint.writing import TensorSave
from lightning_3d.errors import StorageError
from lightning_3d.options.checkpoints import CheckpointOptions


@pytest.mark.parametrize("asynchronous", [True, False], ids=["background", "at once"])
def test_f27_a_rank_that_lost_another_in_a_save_asks_nobody(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may still wait in that save, for this one, which they would meet in no other
    collective."""

    def lose(self: TensorSave, *args: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:41234")

    def asked(*args: object) -> None:
        raise AssertionError("it waits for the others")

    checkpoints = CheckpointStore(CheckpointOptions(checkpoint_asynchronous=asynchronous))
    monkeypatch.setattr(TensorSave, "finish", lose)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        save(tmp_path / "a", 1, checkpoints, mode=SaveMode.BACKGROUND)
        monkeypatch.setattr(store, "through_rank_zero", asked)
        checkpoints.wait()


def test_what_all_ranks_know_is_agreed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TensorSave, *args: object) -> None:
        raise StorageError("the disk is full")

    checkpoints = CheckpointStore()
    monkeypatch.setattr(TensorSave, "finish", fail)
    assert save(tmp_path / "a", 1, checkpoints, mode=SaveMode.BACKGROUND)
    with pytest.warns(UserWarning, match="the disk is full"):
        checkpoints.wait()
