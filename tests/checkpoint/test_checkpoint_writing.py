"""Who writes which slices, and the copies that saves in the background write from. One process."""

from pathlib import Path

import pytest
import torch
from plain_checkpoints import PlainState
from torch import Tensor

from lightning_3d.checkpoint import CheckpointStore, SaveMode, load_full_state_dict, writing
from lightning_3d.checkpoint.resharding import flat_range
from lightning_3d.checkpoint.writing import _describe, _offer, _one_writer_each
from lightning_3d.errors import CheckpointError
from lightning_3d.parallel.sharding import Box, ShardSpec

SPEC = ShardSpec("w", (6, 4), (Box((0, 0), (0, 0), (6, 4)),))


def offers(*ranks: tuple[int, int, bool]) -> list[dict]:
    """Elements [start, stop) of a tensor of 6 rows of 4 that each rank holds, and whether as a
    replica."""
    return [
        {"w": _offer(flat_range(torch.zeros(stop - start), start, SPEC, replica=replica))}
        for start, stop, replica in ranks
    ]


def test_replicas_write_where_they_hold_the_same_slices() -> None:
    ranks = offers((0, 12, False), (12, 24, False), (0, 12, True), (12, 24, True))
    dealt = _one_writer_each(ranks)
    assert sorted(piece for pieces in dealt for piece in pieces) == [
        ("w", (0, 0)),
        ("w", (3, 0)),
    ], "each once"
    assert sorted(map(len, dealt)) == [0, 0, 1, 1]
    table = _describe(ranks, {})
    assert [tuple(chunk.sizes) for chunk in table.state_dict_metadata["w"].chunks] == [
        (3, 4),
        (3, 4),
    ]


def test_replicas_that_are_cut_in_another_way_write_nothing() -> None:
    ranks = offers((0, 12, False), (12, 24, False), (0, 8, True), (8, 24, True))
    assert _one_writer_each(ranks) == [[("w", (0, 0))], [("w", (3, 0))], [], []]
    assert len(_describe(ranks, {}).state_dict_metadata["w"].chunks) == 2
    with pytest.raises(CheckpointError, match="w: 12 of 24 elements"):
        _describe(offers((0, 12, False), (0, 24, True)), {})


def save(path: Path, step: int, state: dict[str, Tensor], store: CheckpointStore) -> bool:
    return store.save(
        path,
        {"global_step": step, "state_dict": state},
        PlainState(),
        None,
        {},
        SaveMode.BACKGROUND,
    )  # type: ignore[arg-type]


def test_saves_in_the_background_of_other_tensors_than_before(tmp_path: Path) -> None:
    """As when parameters are frozen, or saves without optimizer state take turns with those that
    have it."""
    store = CheckpointStore()
    state = {name: torch.arange(1000.0) + index for index, name in enumerate("abc")}
    for step, names in enumerate(("abc", "a", "ab", "abc", "abc")):
        given = {
            name: state[name].to(torch.float64) if step == 4 and name == "b" else state[name]
            for name in names
        }
        expected = {name: tensor.clone() for name, tensor in given.items()}
        assert save(tmp_path / f"{step}", step, given, store)
        for tensor in {**state, **given}.values():
            tensor += 1  # while it is written
        store.wait()
        found = load_full_state_dict(tmp_path / f"{step}")
        assert found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in names
        )
    store.close()


def test_f33_training_goes_on_where_there_is_no_memory_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int, *, page_locked: bool) -> Tensor:
        raise OSError(12, "Cannot allocate memory")

    store, state = CheckpointStore(), {"a": torch.ones(1000)}
    with monkeypatch.context() as patch:
        patch.setattr(writing, "host_memory", refuse)
        assert save(tmp_path / "1", 1, state, store)
        with pytest.warns(
            UserWarning,
            match="not enough host memory to copy the tensors .*: OSError.*Cannot allocate memory",
        ):
            store.wait()
    assert not list(tmp_path.iterdir())
    assert save(tmp_path / "2", 2, state, store)
    store.wait()
    assert load_full_state_dict(tmp_path / "2")["a"].eq(1).all()
    store.close()
