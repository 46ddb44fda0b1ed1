"""The standard library as shards: the tokens, and what happens where several processes or a killed
one write them."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_3d.app.cli import main
from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.data.python_stdlib import PythonStdlib, is_held_out, source_files
from lightning_3d.app.training.data.python_tokens import PythonTokens
from lightning_3d.errors import DataError
from lightning_3d.storage.lock import FileLock

SIZES = {"sequence_length": 16, "global_batch_size": 4, "vocab_size": 257, "val_fraction": 0.3}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Python files with every byte, an empty one among them, and one that is not UTF-8."""
    for number in range(30):
        path = tmp_path / "lib" / f"part{number % 3}" / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            b""
            if number == 7
            else bytes(np.random.default_rng(number).integers(0, 256, 20 + number, dtype=np.uint8))
        )
    return tmp_path / "lib"


def tokens_of(root: Path, cache: Path, **more: Any) -> PythonTokens:
    return PythonTokens(root=root, cache_dir=cache, **{**SIZES, **more})


def shards(cache: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file of the cache."""
    files = (path for path in cache.rglob("*") if path.is_file())
    return {
        str(path.relative_to(cache)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files
    }


def test_the_samples_are_those_of_the_library_in_memory(root: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        mine, plain = (
            tokens_of(root, tmp_path / "cache", seed=seed),
            PythonStdlib(root=root, seed=seed, **SIZES),
        )
        mine.prepare_data()
        mine.setup("fit")
        plain.setup("fit")
        assert (
            mine.train_set is not None
            and plain.train_set is not None
            and mine.val_set is not None
            and plain.val_set is not None
        )
        for ours, expected in ((mine.train_set, plain.train_set), (mine.val_set, plain.val_set)):
            assert len(ours) == len(expected) > 3
            for index in range(len(expected)):
                assert ours[index]["input_ids"].tolist() == expected[index]["input_ids"].tolist()
        assert mine.entropy() == plain.entropy()


def test_the_shards_are_those_of_the_command(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tokens_of(root, tmp_path / "cache")
    data.prepare_data()
    paths = data.split_files()[1]
    assert (
        main(
            [
                "tokenize",
                *(str(root / path) for path in paths),
                "--tokenizer",
                "bytes",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    (folder,) = (tmp_path / "cache").glob("python_tokens-*/validation")
    for name in ("shard-00000.bin", "shard-00000.idx", "manifest.json"):
        assert (folder / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    ids = [
        token
        for path in paths
        if (content := (root / path).read_bytes())
        for token in (*content, 256)
    ]
    assert f"{len(ids)} tokens of uint16" in capfd.readouterr().out
    assert np.fromfile(folder / "shard-00000.bin", dtype="<u2").tolist() == ids


def test_a_second_start_reads_the_shards_and_changed_files_make_others(
    root: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    tokens_of(root, cache).prepare_data()
    before = shards(cache)
    assert sorted(Path(name).name for name in before) == sorted(
        2 * ["manifest.json", "shard-00000.bin", "shard-00000.idx"]
    )
    tokens_of(root, cache, sequence_length=8).prepare_data()
    assert shards(cache) == before
    (root / "part0" / "file0.py").write_bytes(b"changed")
    again = tokens_of(root, cache)
    again.prepare_data()
    again.setup("fit")
    assert {name: shards(cache)[name] for name in before} == before and len(
        shards(cache)
    ) == 2 * len(before)


def test_a_start_after_a_killed_one_and_beside_another_writes_the_same_shards(
    root: Path, tmp_path: Path
) -> None:
    tokens_of(root, tmp_path / "expected").prepare_data()
    expected = {name: content for name, (content, _) in shards(tmp_path / "expected").items()}
    data = tokens_of(root, tmp_path / "cache")
    held = tmp_path / "cache" / next(iter(expected)).partition("/")[0] / "train"
    held.mkdir(parents=True)
    # as a killed process leaves it
    (held / ".shard-00000.bin.partial").write_bytes(b"half of a shard")
    lock = FileLock(held / ".lightning_3d.lock")
    assert lock.acquire()
    thread = threading.Thread(target=data.prepare_data)
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive() and not (held / "manifest.json").exists(), (
        "it waits for the process that writes"
    )
    lock.release(remove=True)
    thread.join(60)
    assert {name: content for name, (content, _) in shards(tmp_path / "cache").items()} == expected


def test_what_cannot_be_tokenized_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"Cannot write the tokens of .*Not a directory\. Set data.cache_dir"
    ):
        tokens_of(root, root / "part0" / "file0.py").prepare_data()
    held_out = [path for path in source_files(root) if is_held_out(path, 0.3)]
    for path in held_out:
        (root / path).unlink()
    with pytest.raises(
        DataError,
        match=r"has no held-out files with data.val_fraction=0.3. Change data.val_fraction",
    ):
        tokens_of(root, tmp_path / "cache").prepare_data()
    with pytest.raises(DataError, match=r"There is no .py file under .*/empty"):
        tokens_of(tmp_path / "empty", tmp_path / "cache").prepare_data()


def test_the_option_keeps_documents_apart() -> None:
    from lightning_3d.app.config.keys import data_options

    options = data_options("python_tokens")
    assert options["document_mask"] is True
    data = make_data_module({**options, "global_batch_size": 4})
    assert isinstance(data, PythonTokens) and data.document_mask and data.tokenizer == "bytes"
