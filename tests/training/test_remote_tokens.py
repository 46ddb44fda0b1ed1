"""Tokens at URLs: the rows of the same files on the disk, a bounded cache that processes share, and
failures of the server."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import assert_refused, run_commands
from data_modules import blend_of, trainer_of
from file_server import FileServer
from piece_reader import read_all
from quick_runs import QUICK, losses
from token_shards import write_shards

from lightning_3d.app.config.data_urls import check_data_urls, data_cache
from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.app.training.data.indexed_file import pack_index
from lightning_3d.app.training.data.shard_manifest import TokenizerIdentity
from lightning_3d.app.training.data.tokens import TokenFiles
from lightning_3d.errors import ConfigError, DataError, UnreachableData
from lightning_3d.storage import steady_path
from lightning_3d.storage.piece_cache import CachedFile, PieceCache
from lightning_3d.storage.steady_path import SteadyPath, without_secrets

pytestmark = pytest.mark.usefixtures("quick_retries")

LENGTH = 2048
PIECE = 2**16
LIMIT = 2**20
"""Bytes of the smallest cache."""
SPAWN: Any = multiprocessing.get_context("spawn")


def tokens_of(path: Any, replicas: int = 1, rank: int = 0, **more: Any) -> Any:
    given = {
        "name": "tokens",
        "train_path": str(path),
        "sequence_length": LENGTH,
        "global_batch_size": 12,
        "vocab_size": 3000,
        "seed": 3,
    }
    data = make_data_module({**given, "val_fraction": 0.05, **more})
    data.trainer = trainer_of(replicas, rank)
    data.prepare_data()
    data.setup()
    return data


def batches(data: Any, count: int | None = None, used: int = 0) -> list[list[list[int]]]:
    """The rows of each batch in the order of training."""
    if used:
        data.resume_from({**data.position_state(), "samples": used})
    found = (batch["input_ids"].tolist() for batch in data.train_dataloader())
    return [rows for _, rows in zip(range(count), found, strict=False)] if count else list(found)


def size_of_cache(folder: Path) -> int:
    """Bytes of all pieces, while none is written or removed."""
    with PieceCache(folder, LIMIT, PIECE).locked("used.lock"):
        return sum(
            file.stat().st_size for file in [*folder.glob("pieces/*/*"), *folder.glob("partial")]
        )


@pytest.mark.slow
def test_rows_are_those_of_the_disk_in_a_cache_that_is_too_small(
    server: FileServer, tmp_path: Path
) -> None:
    folder = write_shards(tmp_path / "files" / "out", 1000, 300_000)
    assert sum(file.stat().st_size for file in folder.glob("*.bin")) == 2_000_000 > 1.9 * LIMIT
    cache = tmp_path / "cache"
    options = {"cache_dir": str(cache), "cache_bytes": LIMIT}
    here, there = tokens_of(folder), tokens_of(f"{server.url}/out", **options)
    largest = 0
    for expected, found in zip(here.train_dataloader(), there.train_dataloader(), strict=True):
        assert found["input_ids"].equal(expected["input_ids"]) and found["labels"].equal(
            expected["labels"]
        )
        largest = max(largest, size_of_cache(cache))
    assert LIMIT / 2 < largest <= LIMIT
    # threads that read ahead may be at their last pieces
    with PieceCache(cache, LIMIT, PIECE).locked("used.lock"):
        used = int((cache / "used").read_text().split()[0])
        assert used >= sum(file.stat().st_size for file in cache.glob("pieces/*/*"))
    rows = [[batch["input_ids"] for batch in data.val_dataloader()] for data in (here, there)]
    assert all(found.equal(expected) for expected, found in zip(*rows, strict=True))
    first, second = (tokens_of(f"{server.url}/out", 2, rank, **options) for rank in range(2))
    whole = batches(here, 6)
    halves = [batches(data, 4, used=24) for data in (first, second)]
    assert [sorted(a + b) for a, b in zip(*halves, strict=True)] == [
        sorted(rows) for rows in whole[2:6]
    ]


def test_a_corpus_that_fits_is_fetched_once(server: FileServer, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "files" / "out", 300, 100_000)
    options = {"cache_dir": str(tmp_path / "cache"), "num_workers": 2}
    data = tokens_of(f"{server.url}/out", **options)
    assert batches(data) == batches(tokens_of(folder))
    binaries = {name: server.ranges(f"out/{name.name}") for name in folder.glob("*.bin")}
    assert {count for found in binaries.values() for count in found.values()} == {1}
    server.forget()
    again = tokens_of(f"{server.url}/out", **options)
    batches(again)
    assert not any(path.endswith(".bin") for method, path, _ in server.requests if method == "GET")
    server.forget()
    given: dict[str, Any] = {
        "sequence_length": LENGTH,
        "global_batch_size": 12,
        "val_fraction": 0.05,
        "cache_dir": tmp_path / "cache",
    }
    data = TokenFiles(train_path=f"{server.url}/out", **given)
    # another rank of the node, after the first one has looked at the URL
    data.trainer = trainer_of(1, 0)
    data.setup()
    assert not server.requests and len(data.train_set or []) == len(again.train_set)


def _read_first_bytes(url: str) -> None:
    assert SteadyPath(url, attempts=1).fetch(0, 10) == bytes(10)


def test_a_forked_reader_leaves_the_connections_of_its_parent(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady_path, "_REQUEST_SECONDS", 5.0)
    (server.folder / "zeros.bin").write_bytes(bytes(10))
    for _ in range(3):
        _read_first_bytes(f"{server.url}/zeros.bin")
        reader = multiprocessing.get_context("fork").Process(
            target=_read_first_bytes, args=(f"{server.url}/zeros.bin",)
        )
        reader.start()
        reader.join()
        assert reader.exitcode == 0
    _read_first_bytes(f"{server.url}/zeros.bin")


@pytest.mark.parametrize("step", ["_used", "_shrink", "_note"])
def test_a_disk_that_is_full_while_the_cache_counts_is_named(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = PieceCache(tmp_path, 100, PIECE)
    cache.prepare()
    cache.store(tmp_path / "pieces" / "3e" / "first", bytes(80))
    monkeypatch.setattr(PieceCache, step, fail)
    with pytest.raises(
        UnreachableData,
        match=r"cannot be written: No space left on device. Set a smaller data.cache_bytes, or",
    ):
        cache.store(tmp_path / "pieces" / "3f" / "second", bytes(80))


def test_pieces_are_fetched_before_they_are_read(server: FileServer, tmp_path: Path) -> None:
    write_shards(tmp_path / "files" / "out", 500, 10**9)
    data = tokens_of(f"{server.url}/out", cache_dir=str(tmp_path / "cache"))
    loader = iter(data.train_dataloader())
    next(loader)
    ahead = [data.train_set.pieces(index) for index in list(data._order(0, iter(range(60))))]
    wanted = {number for pieces in ahead for _, number in pieces}
    file = ahead[0][0][0]
    deadline = time.monotonic() + 120
    while not all(file.is_cached(number) for number in wanted) and time.monotonic() < deadline:
        time.sleep(0.01)
    missing = [number for number in wanted if not file.is_cached(number)]
    assert not missing, "four batches after the first one are fetched while nothing reads"


def test_a_blend_of_urls_and_files(server: FileServer, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "files" / "out", 100, 30_000)
    found = []
    for path in (folder, f"{server.url}/out"):
        sources = {
            "web": {"train_path": str(path), "weight": 2},
            "own": {"train_path": str(folder), "weight": 1},
        }
        found.append(
            batches(blend_of(sources, sequence_length=LENGTH, global_batch_size=6, steps=10), 20)
        )
    assert found[0] == found[1]


def test_megatron_files_and_local_urls(server: FileServer, tmp_path: Path) -> None:
    tokens = np.arange(40_000, dtype=np.int32)
    (tmp_path / "files" / "x.bin").write_bytes(tokens.tobytes())
    (tmp_path / "files" / "x.idx").write_bytes(pack_index(np.full(40, 1000), tokens.dtype))
    for path in (f"{server.url}/x.bin", f"{server.url}/x", f"file://{tmp_path}/files/x.bin"):
        data = TokenFiles(
            train_path=path, sequence_length=LENGTH, global_batch_size=2, val_fraction=0
        )
        data.setup()
        assert data.train_set is not None
        rows = [data.train_set[index]["input_ids"].tolist() for index in range(len(data.train_set))]
        assert rows == tokens[: 40_000 // LENGTH * LENGTH].reshape(-1, LENGTH).tolist()
    (tmp_path / "files" / "x.bin").write_bytes(tokens[::-1].tobytes())
    os.utime(tmp_path / "files" / "x.bin", (1, 1))
    data = TokenFiles(
        train_path=f"{server.url}/x", sequence_length=LENGTH, global_batch_size=2, val_fraction=0
    )
    data.setup()
    assert (
        data.train_set is not None
        and data.train_set[0]["input_ids"].tolist() == tokens[::-1][:LENGTH].tolist()
    )


# The server fails


def test_errors_that_pass(server: FileServer, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "files" / "out", 100, 10**9)
    server.failing = [503, 500, 429]
    data = tokens_of(f"{server.url}/out")
    assert not server.failing
    server.failing = [500, 503, 502]
    assert batches(data, 3) == batches(tokens_of(folder), 3)
    assert not server.failing


def test_a_file_that_is_missing_is_looked_for_once() -> None:
    """Backends of object stores chain the error of their client, as s3fs does, and that of HTTP
    hides broken connections."""
    tries = []

    def look(error: Exception, cause: Exception) -> None:
        tries.append(error)
        raise error from cause

    path = SteadyPath("s3://bucket/x", attempts=3)
    for cause, kind, expected in (
        (KeyError("NoSuchKey"), FileNotFoundError, 1),
        (KeyError("AccessDenied"), PermissionError, 1),
        (ConnectionResetError("reset"), FileNotFoundError, 3),
        (ConnectionResetError("reset"), OSError, 3),
    ):
        tries.clear()
        with pytest.raises(OSError, match="s3://bucket/x") as caught:
            path._steadily(lambda kind=kind, cause=cause: look(kind("x"), cause))
        missing = isinstance(cause, KeyError) and kind is FileNotFoundError
        assert (len(tries), isinstance(caught.value, FileNotFoundError)) == (expected, missing)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_server_that_fails_for_good_is_one_message(
    server: FileServer, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    write_shards(tmp_path / "files" / "out", 100, 10**9)
    data = tokens_of(f"{server.url}/out", num_workers=workers)
    server.always = {".bin": 500}
    with pytest.raises(UnreachableData) as caught:
        batches(data, 1)
    assert str(caught.value).startswith(
        f"Rank 3 cannot read training data: {server.url}/out/shard-00000.bin:"
        " ClientResponseError: 500"
    )
    assert str(caught.value).endswith("(9 attempts).") and caught.value.exit_code == 1


BAD: dict[str, str] = {
    "nothing": (
        "There is no data at URL/nothing, neither a manifest.json below it nor nothing.bin next"
        " to it"
    ),
    "truncated": "shard-00001.bin and shard-00001.idx do not match: the .bin has 1000 bytes",
    "missing": "lacks shard-00001.idx, which its manifest.json lists",
    "changed": "shard-00001.bin has changed since it was written: its SHA-256 is",
    "another": (
        "are of different tokenizers: words (3000 ids, vocabulary aaaaaaaaaaaa...) and bytes"
        " (300 ids"
    ),
    "forbidden": "Training data cannot be read: URL/out/manifest.json: ClientResponseError: 403",
    "dead": "(5 attempts).",
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_url_is_refused_before_ranks_are_started(
    server: FileServer, tmp_path: Path, case: str
) -> None:
    folder = write_shards(tmp_path / "files" / "out", 50, 20_000)
    config = {
        "name": "tokens",
        "train_path": f"{server.url}/out",
        "check_hashes": True,
        "sequence_length": LENGTH,
    }
    check_files(config)
    if case == "nothing":
        config["train_path"] = f"{server.url}/nothing"
    elif case == "truncated":
        os.truncate(folder / "shard-00001.bin", 1000)
    elif case == "missing":
        (folder / "shard-00001.idx").unlink()
    elif case == "changed":
        data = bytearray((folder / "shard-00001.bin").read_bytes())
        data[10] ^= 1
        (folder / "shard-00001.bin").write_bytes(data)
    elif case == "another":
        write_shards(
            tmp_path / "files" / "other",
            50,
            20_000,
            TokenizerIdentity("bytes", 300, 0, "c" * 64, "d" * 64),
        )
        config["val_path"] = f"{server.url}/other"
    elif case == "forbidden":
        server.always = {"manifest": 403}
    else:
        server.always = {"": 503}
    with pytest.raises(DataError) as caught:
        check_files(config)
    assert BAD[case].replace("URL", server.url) in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://me:secret@host/x", "train_path has a password in its URL, or a token"),
        (
            "https://host/x.bin?X-Amz-Signature=secret",
            "train_path has a password in its URL, or a token",
        ),
        ("https://host/x.bin?version=secret", r"has a query \(https://host/x.bin\?...\)"),
        ("nothing://bucket/x", 'fsspec does not support "nothing://"'),
    ],
)
def test_urls_that_the_configuration_refuses(url: str, message: str) -> None:
    for data in (
        {"name": "tokens", "train_path": url},
        {"name": "blend", "sources": {"web": {"train_path": url}}},
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            check_data_urls({**data, "sequence_length": LENGTH})
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "at 'https://u:p@h/x?X-Amz-Signature=abc' and s3://b/c",
            "at 'https://...@h/x?...' and s3://b/c",
        ),
        ("https://u:p@ss@h/x (https://token@h/y?abc)", "https://...@h/x (https://...@h/y?...)"),
        ("s3://b/x?versionId=1 s3://u:p@b/?/x?&sig=a/b", "s3://b/x?... s3://...@b/?/x?..."),
        (
            "There is no data at s3://b/a/?.bin: no file.",
            "There is no data at s3://b/a/?.bin: no file.",
        ),
        ("gs://b/day=??/hour=?/[!0]?.bin", "gs://b/day=??/hour=?/[!0]?.bin"),
        ("/data/a?key=1.bin", "/data/a?key=1.bin"),
    ],
)
def test_secrets_are_left_out_of_messages(text: str, shown: str) -> None:
    """The query of a URL is left out, but not the signs of a pattern of files."""
    assert without_secrets(text) == shown


def test_the_limit_of_the_cache_is_checked(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="must be at least 1048576"):
        data_cache(None, 1000, LENGTH)
    with pytest.raises(
        ConfigError, match="holds fewer than 4 pieces of 1.05 MB, .* Use at least 4194304"
    ):
        data_cache(None, 2e6, 2**18)
    assert (
        data_cache(None, None, 2048).piece == 2**16 and data_cache(None, 1e12, 2048).piece == 2**22
    )
    write_shards(tmp_path / "files" / "out", 100, 10**9)
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: os.terminal_size((0, 0)) and type("Disk", (), {"free": 1000})(),
    )
    with pytest.raises(DataError, match="may take 200 kB, but the disk of .* has only 1.00 kB"):
        check_files(
            {"name": "tokens", "train_path": f"{server.url}/out", "sequence_length": LENGTH}
        )


# The cache among processes


def cached(server: FileServer, folder: Path, size: int = 64 * PIECE) -> CachedFile:
    contents = np.random.default_rng(1).bytes(size)
    (server.folder / "file").write_bytes(contents)
    cache = PieceCache(folder, LIMIT, PIECE)
    cache.prepare()
    return CachedFile(SteadyPath(f"{server.url}/file"), "0" * 32, size, cache)


def test_two_processes_fetch_a_piece_once(server: FileServer, tmp_path: Path) -> None:
    file = cached(server, tmp_path / "cache")
    readers = [
        SPAWN.Process(target=read_all, args=(file, seed, server.folder / "file"))
        for seed in range(2)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert [reader.exitcode for reader in readers] == [0, 0]
    assert list(server.ranges("file").values()) == [1] * 8


@pytest.mark.slow
def test_kills_leave_whole_pieces_and_the_bound(server: FileServer, tmp_path: Path) -> None:
    file = cached(server, tmp_path / "cache")
    readers = [
        SPAWN.Process(target=read_all, args=(file, seed, server.folder / "file", 60))
        for seed in range(2)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        deadline = time.monotonic() + 60
        before = server.sent
        while server.sent < before + 20 * PIECE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert size_of_cache(tmp_path / "cache") <= LIMIT
        os.kill(reader.pid, signal.SIGKILL)
        reader.join()
        assert reader.exitcode == -signal.SIGKILL
    contents = (server.folder / "file").read_bytes()
    names = [path.name for path in tmp_path.glob("cache/pieces/*/*")]
    assert names
    server.always = {"file": 404}  # what is cached is whole
    for name in names:
        number = int(name.rpartition("-")[2])
        assert file.piece(number) == contents[number * PIECE : (number + 1) * PIECE]
    server.always = {}
    read_all(file, 5, server.folder / "file", 0.2)
    assert size_of_cache(tmp_path / "cache") <= LIMIT


def test_a_damaged_piece_is_fetched_again(server: FileServer, tmp_path: Path) -> None:
    file = cached(server, tmp_path / "cache")
    good = file.piece(3)
    path = next(tmp_path.glob("cache/pieces/*/*-3"))
    for damage in (path.read_bytes()[:100], b"\0" * (PIECE + 4)):
        path.write_bytes(damage)
        assert file.piece(3) == good
    assert list(server.ranges("file").values()) == [3]


def test_the_least_recently_used_piece_goes_first(server: FileServer, tmp_path: Path) -> None:
    file = cached(server, tmp_path / "cache")
    for number in range(15):
        file.piece(number)
        time.sleep(0.01)  # longer than the clock of the file system ticks
    file.piece(0)
    time.sleep(0.01)
    file.piece(15)
    assert [number for number in range(16) if not file.is_cached(number)] == [1]


# The command


def job(path: Path | str, run: Path, *more: str) -> list[str]:
    small = [
        f"data.train_path={path}",
        "data.sequence_length=512",
        "data.global_batch_size=4",
        "data.val_sequences=4",
    ]
    small += ["data.num_workers=1", "parallelism=dp2", "parallelism.micro_batch_size=1"]
    model = [line for line in QUICK if line.startswith("model.")] + ["model.config.vocab_size=3000"]
    steps = [
        "trainer.max_steps=4",
        "trainer.val_check_interval=2",
        "trainer.checkpoint_every_n_steps=2",
        f"hydra.run.dir={run}",
    ]
    return ["train", "data=tokens", *small, *model, *steps, *more]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_reads_a_url_and_resumes_in_another_layout(
    server: FileServer, tmp_path: Path
) -> None:
    folder = write_shards(tmp_path / "files" / "out", 500, 200_000)
    cache = [f"data.cache_dir={tmp_path}/cache", "data.cache_bytes=1048576"]
    lines = [
        job(folder, tmp_path / "a"),
        job(f"{server.url}/out", tmp_path / "b", *cache),
        job(
            f"{server.url}/out",
            tmp_path / "c",
            *cache,
            "parallelism=pp2",
            f"trainer.resume={tmp_path}/b/checkpoints/step_2.ckpt",
        ),
        job(f"{server.url}/gone", tmp_path / "d", *cache),
    ]
    here, there, resumed, refused = run_commands(lines, timeout=850, warm=True)
    assert (here.code, there.code, resumed.code) == (0, 0, 0), (
        here.output + there.output + resumed.output
    )
    assert_refused(refused, [f"There is no data at {server.url}/gone"])
    assert not (tmp_path / "d").exists()
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert [float(loss) for loss in losses(tmp_path / "c")] == pytest.approx(
        [float(loss) for loss in losses(tmp_path / "a")[2:]], rel=1e-5
    )
    assert size_of_cache(tmp_path / "cache") <= LIMIT


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_server_that_dies_ends_the_run_with_one_message(
    server: FileServer, tmp_path: Path
) -> None:
    write_shards(tmp_path / "files" / "out", 2000, 10**9)
    server.dies_after = 30
    more = [
        "trainer.max_steps=50",
        "trainer.val_check_interval=50",
        f"data.cache_dir={tmp_path}/cache",
    ]
    line = job(f"{server.url}/out", tmp_path / "a", *more)
    (ended,) = run_commands([line], timeout=850, warm=True)
    assert ended.code == 1 and "Traceback" not in ended.output, ended.output
    messages = [
        line for line in ended.output.splitlines() if line.startswith("lightning_3d: Rank ")
    ]
    assert (
        len(messages) == 1
        and f" cannot read training data: {server.url}/out/shard-00000.bin: " in messages[0]
    ), ended.output
