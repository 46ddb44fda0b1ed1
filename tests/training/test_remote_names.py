"""What a URL of `data=tokens` may name: arrays of NumPy, either file of Megatron's pairs, patterns
and lists, as on the disk."""

from __future__ import annotations

import glob
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from command_line import assert_refused, run_commands
from data_modules import blend_of, trainer_of
from file_server import FileServer
from fsspec.spec import AbstractFileSystem
from quick_runs import QUICK
from token_shards import write_shards

from lightning_3d.app.config.blend_sources import read_sources
from lightning_3d.app.config.data_urls import check_data_urls
from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.data.corpus import find_at_url, find_corpus
from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.app.training.data.indexed_file import pack_index
from lightning_3d.errors import ConfigError, DataError, UnreachableData
from lightning_3d.storage.steady_path import SteadyPath

LENGTH, TOKENS, VOCABULARY = 1024, 400_000, 3000
LIMIT = 2**20
"""Bytes of the smallest cache."""
pytestmark = pytest.mark.usefixtures("quick_retries")

IDS = np.random.default_rng(0).integers(1, VOCABULARY, TOKENS, dtype=np.int32)


def upload(folder: Path) -> str:
    """Copy a folder into the memory of this process. Returns its URL."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    for file in folder.rglob("*"):
        if file.is_file():
            memory.pipe(f"/bucket/{file.relative_to(folder)}", file.read_bytes())
    return "memory://bucket"


def write_pair(path: Path, ids: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ids.tobytes())
    path.with_suffix(".idx").write_bytes(pack_index(np.array([len(ids)]), ids.dtype))


def write_json(path: Path, ids: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ids.tobytes())
    path.with_suffix(".json").write_text(
        json.dumps({"dtype": ids.dtype.name, "tokens": len(ids), "vocab_size": VOCABULARY})
    )


def module(path: Any, **more: Any) -> Any:
    given = {
        "name": "tokens",
        "train_path": path,
        "sequence_length": LENGTH,
        "global_batch_size": 1,
        "vocab_size": VOCABULARY,
        "seed": 3,
    }
    data = make_data_module({**given, "val_fraction": 0.0, **more})
    data.trainer = trainer_of(1, 0)
    data.prepare_data()
    data.setup()
    return data


def rows(data: Any) -> list[list[list[int]]]:
    """The rows of each batch of an epoch."""
    return [batch["input_ids"].tolist() for batch in data.train_dataloader()]


ROWS = [
    ("http", 0),
    ("memory", 2),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (("http", 2), ("memory", 0))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("store", "workers"), ROWS)
def test_rows_are_those_of_the_disk(
    store: str, workers: int, server: FileServer, tmp_path: Path
) -> None:
    files, length = tmp_path / "files", 8192
    np.save(files / "array.npy", IDS)
    write_pair(files / "pair.bin", IDS)
    url = server.url if store == "http" else upload(files)
    shape = {"sequence_length": length, "global_batch_size": 4}
    options = {
        "cache_dir": str(tmp_path / "cache"),
        "cache_bytes": LIMIT,
        "num_workers": workers,
        **shape,
    }
    assert IDS.nbytes > 1.5 * LIMIT
    here = module(str(files / "pair.bin"), **shape)
    expected = IDS[: TOKENS // length * length].reshape(-1, length)
    assert all(
        np.array_equal(here.train_set[place]["input_ids"], row)
        for place, row in enumerate(expected)
    )
    order = rows(here)
    for name in ("array.npy", "pair.idx"):
        assert rows(module(str(files / name), **shape)) == order
        assert rows(module(f"{url}/{name}", **options)) == order
    both = rows(module([str(files / "array.npy"), str(files / "pair.bin")], **shape))
    assert rows(module([f"{url}/array.npy", f"{url}/pair"], **options)) == both != order


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "uint32", "int64"])
def test_arrays_of_each_type(dtype: str, tmp_path: Path) -> None:
    ids = (IDS[:5000] % 100).astype(dtype)
    np.save(tmp_path / "x.npy", ids)
    np.save(tmp_path / "y.npy", IDS[:5000])
    for path in (str(tmp_path), upload(tmp_path)):
        data = module([f"{path}/x.npy", f"{path}/y.npy"])
        found = np.concatenate(
            [data.train_set[place]["input_ids"] for place in range(len(data.train_set))]
        )
        assert (
            np.array_equal(found, np.concatenate([ids, IDS[:5000]])[: len(found)])
            and len(found) == 10_000 // LENGTH * LENGTH
        )


PATTERNS = (
    "*.npy",
    "a*/*.bin",
    "**/*.bin",
    "**/*.idx",
    "[ab]/0.bin",
    "a/?.bin",
    "a/1*",
    "a**/0.*",
    ".hidden/*.bin",
    "a/[!0].bin",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_names_the_files_that_it_names_on_the_disk(pattern: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    for number, name in enumerate(
        ["a/0", "a/1", "a/10", "a-x/0", "b/0", "b/c/0", ".hidden/0", "a/.1"]
    ):
        write_pair(folder / f"{name}.bin", IDS[number * 100 : (number + 1) * 100])
    for name in ("1.npy", "10.npy", "2.npy"):
        np.save(folder / name, IDS[: 1000 + int(name[:-4])])
    (folder / "a" / "readme.txt").write_text("no tokens")
    url = upload(folder)
    for find, path in ((find_corpus, folder / "*"), (find_at_url, SteadyPath(f"{url}/*"))):
        with pytest.raises(DataError, match="/a has no manifest.json"):  # it matches folders, too
            find(path)
    there = find_at_url(SteadyPath(f"{url}/{pattern}"))
    names = [str(part.path).removeprefix(f"{url}/") for part in there.parts]
    matches = sorted(Path(match) for match in glob.glob(str(folder / pattern), recursive=True))
    files = [
        str(match.relative_to(folder))
        for match in matches
        if match.suffix in (".bin", ".idx", ".npy")
    ]
    wanted = dict.fromkeys(file.replace(".idx", ".bin") for file in files)
    assert names == list(wanted) and names
    here = find_corpus(folder / pattern)
    facts = [
        [(part.dtype, part.tokens, part.offset) for part in corpus.parts]
        for corpus in (here, there)
    ]
    assert facts[0] == facts[1]


class Guarded(AbstractFileSystem):
    """A store whose folders can be listed, but for one."""

    protocol = "guarded"
    cachable = False
    refused, error = "/bucket/b", PermissionError("no access to this folder")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if f"/{path.strip('/')}" == self.refused:
            raise self.error
        return fsspec.filesystem("memory").ls(path, detail)

    def info(self, path: str, **kwargs: Any) -> Any:
        return fsspec.filesystem("memory").info(path)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        return fsspec.filesystem("memory").cat_file(path, start, end)


HIDDEN = {  # the pattern, the folder that cannot be listed, and the error
    "permission": (
        "*.bin",
        "/bucket",
        PermissionError("no access to this folder"),
        "PermissionError: no access to this folder",
    ),
    "below": (
        "*/0.bin",
        "/bucket/b",
        PermissionError("no access to this folder"),
        "PermissionError: no access to this folder",
    ),
    "host": (
        "**/*.bin",
        "/bucket",
        ConnectionRefusedError(111, "Connection refused"),
        "Connection refused (5 attempts)",
    ),
    "host below": (
        "*/*",
        "/bucket/b",
        TimeoutError("nothing came"),
        "TimeoutError: nothing came (5 attempts)",
    ),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, refused, error, words = HIDDEN[case]
    for name in ("a/0", "b/0"):
        write_pair(tmp_path / f"{name}.bin", IDS[:5000])
    upload(tmp_path)
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    monkeypatch.setattr(Guarded, "refused", refused)
    monkeypatch.setattr(Guarded, "error", error)
    with pytest.raises(DataError) as caught:
        check_files(
            {
                "name": "tokens",
                "train_path": f"guarded://bucket/{pattern}",
                "sequence_length": LENGTH,
            }
        )
    assert str(caught.value).startswith(
        f"Training data cannot be read: guarded://bucket/{pattern}: "
    ) and words in str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_a_folder_that_does_not_match_need_not_be_listed(tmp_path: Path) -> None:
    for name in ("a/0", "b/0", "b/c/0"):
        write_pair(tmp_path / f"{name}.bin", IDS[:5000])
    upload(tmp_path)
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    for pattern, name in (
        ("bucket/a*/*.bin", "a/0"),
        ("bucket/[a]/0.bin", "a/0"),
        ("bucket/?/c/*.bin", "b/c/0"),
        ("b*/a/*.bin", "a/0"),
    ):
        assert [
            str(part.path) for part in find_at_url(SteadyPath(f"guarded://{pattern}")).parts
        ] == [f"guarded://bucket/{name}.bin"]
    with pytest.raises(DataError, match="no folder, .bin or .npy file matches this pattern"):
        find_at_url(SteadyPath("guarded://nowhere/*.bin"))


def test_a_pattern_of_folders_of_shards_and_a_blend(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("web-1", "web-2"):
        write_shards(folder / name, 20, 5000)
    url = upload(folder)
    order = rows(module(str(folder / "web-*")))
    assert rows(module(f"{url}/web-*", num_workers=2, cache_dir=str(tmp_path / "cache"))) == order
    found = []
    for path in (str(folder), url):
        web, own = f"{path}/web-*", [f"{path}/web-2", f"{path}/web-1"]
        sources = {"web": {"train_path": web, "weight": 2}, "own": {"train_path": own, "weight": 1}}
        data = blend_of(sources, sequence_length=LENGTH, global_batch_size=3, steps=4)
        found.append(
            [
                batch["input_ids"].tolist()
                for _, batch in zip(range(4), data.train_dataloader(), strict=False)
            ]
        )
    assert found[0] == found[1]


def array_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


ARRAY = array_bytes(IDS[:5000])
BAD: dict[str, tuple[str, str]] = {  # the stores, all if empty, and the message
    "gone.npy": (
        "http memory",
        (
            "There is no data at URL/gone.npy. Name a folder of lightning-3d tokenize, a .bin or a"
            " .npy file."
        ),
    ),
    "gone.idx": ("http memory", "There is no data at URL/gone.idx."),
    "half.npy": (
        "",
        (
            "URL/half.npy has 9128 bytes, but its head says 5000 tokens of int32, which take 20128"
            " bytes. It is truncated"
        ),
    ),
    "head.npy": ("", "URL/head.npy is not a file of numpy.save: EOF: reading array header"),
    "text.npy": ("", "URL/text.npy is not a file of numpy.save: the magic string is not correct"),
    "float.npy": (
        "",
        (
            "URL/float.npy has an array of type <f8 with 1 dimension. Save one of 1 dimension and"
            " of a little-endian type:"
        ),
    ),
    "big.npy": ("", "URL/big.npy has an array of type >u2 with 1 dimension."),
    "rows.npy": ("", "URL/rows.npy has an array of type <i4 with 2 dimensions."),
    "alone.idx": ("", "URL/alone.idx has no alone.bin next to it. Copy both files."),
    "half.idx": ("", "URL/half.bin and half.idx do not match: the .bin has 100 bytes"),
    "no*.bin": (
        "memory",
        "There is no data at URL/no*.bin: no folder, .bin or .npy file matches this pattern.",
    ),
    "half*": ("memory", "half.bin and half.idx do not match: the .bin has 100 bytes"),
    "forbidden.npy": (
        "http",
        "Training data cannot be read: URL/forbidden.npy: ClientResponseError: 403",
    ),
}


@pytest.mark.parametrize(
    ("name", "store"),
    [(name, store) for name in BAD for store in (BAD[name][0] or "disk http memory").split()],
)
def test_bad_files_are_refused_before_ranks_are_started(
    name: str, store: str, server: FileServer, tmp_path: Path
) -> None:
    words = BAD[name][1]
    files = tmp_path / "files"
    for file, contents in {
        "half.npy": ARRAY[:9128],
        "head.npy": ARRAY[:50],
        "text.npy": b"tokens" * 100,
        "float.npy": array_bytes(np.zeros(10)),
        "big.npy": array_bytes(np.zeros(10, ">u2")),
        "rows.npy": array_bytes(IDS[:10].reshape(2, 5)),
        "forbidden.npy": ARRAY,
        "alone.idx": pack_index(np.array([10]), IDS.dtype),
        "half.idx": pack_index(np.array([1000]), IDS.dtype),
        "half.bin": bytes(100),
    }.items():
        (files / file).write_bytes(contents)
    server.always = {"forbidden": 403}
    url = {"disk": str(files), "http": server.url, "memory": ""}[store] or upload(files)
    with pytest.raises(DataError) as caught:
        check_files({"name": "tokens", "train_path": f"{url}/{name}", "sequence_length": LENGTH})
    assert words.replace("URL", url) in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "https://host/web/*.bin",
            (
                r"is a pattern, and web servers do not"
                r" list.*train_path=\[https://.../0.bin,https://.../1.bin\]"
            ),
        ),
        (["https://host/0.bin", "http://host/[01].bin"], "http://host/.01..bin is a pattern"),
        ([], r"train_path must be a path, a URL, or a list with at least one of them; got \[\]"),
        (
            ["x.bin", 5],
            (
                r"train_path must be a path, a URL, or a list with at least one of them; got"
                r" \['x.bin', 5\]"
            ),
        ),
        (
            ["https://host/0.bin", "https://me:secret@host/x"],
            "train_path has a password in its URL",
        ),
    ],
)
def test_paths_that_the_configuration_refuses(value: Any, message: str) -> None:
    for data in (
        {"name": "tokens", "train_path": value},
        {"name": "blend", "sources": {"web": {"train_path": value}}},
    ):
        with pytest.raises(ConfigError, match=message):
            check_data_urls({**data, "sequence_length": LENGTH})
    check_data_urls(
        {
            "name": "tokens",
            "train_path": ["s3x.bin", "http://[::1]:80/0.bin"],
            "sequence_length": LENGTH,
        }
    )


def test_a_source_takes_a_list_of_strings_only() -> None:
    assert read_sources({"web": {"train_path": ["a", "b"], "weight": 1}}, LENGTH)[0].train_path == [
        "a",
        "b",
    ]
    for key, value in (("train_path", []), ("train_path", ["a", 1]), ("val_path", [2])):
        with pytest.raises(ConfigError, match=f"data.sources.web.{key} must be"):
            read_sources({"web": {"train_path": "a", "weight": 1, key: value}}, LENGTH)


def test_files_with_a_json_and_documents_of_an_array(tmp_path: Path) -> None:
    """The JSON says the separator, and an array needs the option."""
    (tmp_path / "files").mkdir()
    write_json(tmp_path / "files" / "x.bin", IDS[:5000].astype(np.uint16))
    # next to a JSON that is not its own
    np.save(tmp_path / "files" / "x.npy", IDS[:5000].astype(np.uint16))
    url = upload(tmp_path / "files")
    for path in (tmp_path / "files", url):
        samples = [
            module(f"{path}/x.{kind}").train_set[1]["input_ids"].tolist() for kind in ("bin", "npy")
        ]
        assert samples == [IDS[LENGTH : 2 * LENGTH].tolist()] * 2
        with pytest.raises(
            ConfigError,
            match=(
                "document_mask=true needs the token that ends a document, and .*x.npy does not"
                " say it"
            ),
        ):
            module(f"{path}/x.npy", document_mask=True)
        positions = (
            module(f"{path}/x.npy", document_mask=True, document_separator=7)
            .train_set[1]["position_ids"]
            .numpy()
        )
        ends = np.flatnonzero(IDS[LENGTH : 2 * LENGTH - 1] == 7) + 1
        assert np.array_equal(np.flatnonzero(positions == 0), [0, *ends])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cache_that_is_removed_while_a_loader_reads(workers: int, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IDS)
    data = module(
        f"{upload(tmp_path)}/x.npy", cache_dir=str(tmp_path / "cache"), num_workers=workers
    )
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UnreachableData) as caught:
        next(iter(data.train_dataloader()))
    assert str(caught.value).startswith(
        f"The cache of remote data, {tmp_path}/cache, cannot be written: No such file or directory."
    )


@pytest.mark.full
@pytest.mark.timeout(600)
def test_runs_read_lists_and_refuse_bad_names(server: FileServer, tmp_path: Path) -> None:
    for number in range(2):
        np.save(tmp_path / "files" / f"{number}.npy", IDS[number * 20_000 : (number + 1) * 20_000])
    model = [line for line in QUICK if line.startswith("model.")] + [
        f"model.config.vocab_size={VOCABULARY}"
    ]
    small = [
        "data=tokens",
        "data.sequence_length=64",
        "data.global_batch_size=4",
        "data.val_sequences=4",
        "parallelism=dp2",
        *model,
    ]
    small += [
        "trainer.max_steps=2",
        "trainer.val_check_interval=2",
        f"data.cache_dir={tmp_path}/cache",
    ]
    names = [
        f"[{server.url}/0.npy,{server.url}/1.npy]",
        f"{server.url}/*.npy",
        f"{server.url}/2.npy",
    ]
    lines = [
        ["train", *small, f"data.train_path={name}", f"hydra.run.dir={tmp_path}/{number}"]
        for number, name in enumerate(names)
    ]
    lines.append(
        [
            "train",
            *small,
            f"data.train_path=[{tmp_path}/files/0.npy,{tmp_path}/files/1.npy]",
            f"hydra.run.dir={tmp_path}/disk",
        ]
    )
    there, pattern, gone, here = run_commands(lines, timeout=500, warm=True)
    assert (there.code, here.code) == (0, 0), there.output + here.output
    losses = [
        [line.split(",")[1] for line in (tmp_path / run / "metrics.csv").read_text().splitlines()]
        for run in ("0", "disk")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert_refused(pattern, ["is a pattern, and web servers do not list their files"])
    assert_refused(gone, [f"There is no data at {server.url}/2.npy."])
    assert not os.path.exists(tmp_path / "1") and not os.path.exists(tmp_path / "2")
