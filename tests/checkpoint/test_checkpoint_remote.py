"""Checkpoints at URLs: the same promises as on a disk, where there is no rename, no lock and no
folder. One process, no model."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fits import TiedModel, make_trainer
from command_line import run_commands
from lightning.pytorch.callbacks import ModelCheckpoint
from object_store import Bucket, register
from parity import StepValues
from plain_checkpoints import PlainState, background, flip_bit, refusal, save, tensors
from quick_runs import QUICK
from ranks import run_ranks

from lightning_3d.checkpoint import (
    CheckpointStore,
    SaveMode,
    folder,
    load_full_state_dict,
    read_manifest,
)
from lightning_3d.checkpoint.folder import MANIFEST
from lightning_3d.checkpoint.inspection import describe
from lightning_3d.checkpoint.reading import TensorFolder
from lightning_3d.checkpoint.resharding import Slices
from lightning_3d.checkpoint.writing import TensorSave
from lightning_3d.errors import CheckpointError, StorageError
from lightning_3d.options.checkpoints import CheckpointOptions
from lightning_3d.storage import lock
from lightning_3d.storage.checkpoint_names import checkpoints_in
from lightning_3d.storage.lock import Lease
from lightning_3d.storage.remote_path import RemotePath, place

SHARD = "__0_0.distcp"
STATE: Any = PlainState()


@pytest.fixture(autouse=True)
def healthy() -> Iterator[None]:
    register()
    Bucket.heal()
    yield
    Bucket.heal()


@pytest.fixture
def bucket(tmp_path: Path) -> RemotePath:
    return RemotePath(f"bucket://{tmp_path}/run")


def on_disk(path: RemotePath) -> Path:
    """Where the object store of the tests has it."""
    return Path(path.url.removeprefix("bucket://"))


def objects(path: RemotePath) -> set[str]:
    """Names of all objects; the folder of a save is written as `*`."""
    found = (item.relative_to(on_disk(path)) for item in on_disk(path).rglob("*") if item.is_file())
    return {
        "/".join("*" if part.startswith("lightning_3d-") else part for part in item.parts)
        for item in found
    }


def whole(*names: str) -> set[str]:
    files = [MANIFEST, "*/.metadata", f"*/{SHARD}", "*/trainer.json", "*/trainer.safetensors"]
    return {f"{name}/{file}" for name in names for file in files}


def save_at(path: Any, step: int, *options: Any, **more: Any) -> bool:
    return save(path, step, *options, **more)


def refusal_of(path: Any) -> str:
    return refusal(path)


def step_of(path: Any) -> int:
    step = read_manifest(place(path))["global_step"]
    assert torch.equal(load_full_state_dict(path)["weight"], tensors(step)["weight"])
    return step


@pytest.mark.parametrize("url", ["memory://a/run", "bucket://{}/run", "file://{}/run"])
def test_what_was_saved_is_loaded(url: str, tmp_path: Path) -> None:
    path = url.format(tmp_path) + "/step_1"
    save_at(path, 1)
    assert step_of(path) == 1
    loaded = CheckpointStore().load(path)
    assert (loaded["global_step"], loaded["note"].tolist()) == (1, [1.0, 1.0, 1.0])


def test_a_url_of_the_local_disk_is_the_local_disk(tmp_path: Path) -> None:
    save_at(f"file://{tmp_path}/a", 1)
    assert (tmp_path / "a" / SHARD).is_file() and step_of(tmp_path / "a") == 1


def test_a_copy_on_the_local_disk_is_as_good(bucket: RemotePath, tmp_path: Path) -> None:
    save_at(bucket / "a", 1)
    on_disk(bucket / "a").rename(tmp_path / "copy")
    assert step_of(tmp_path / "copy") == 1
    assert CheckpointStore().load(tmp_path / "copy")["global_step"] == 1


def test_only_needed_bytes_are_fetched(bucket: RemotePath) -> None:
    """Of 16 MB one row, and what says where it is."""
    weights = {"weight": torch.arange(4_000_000.0).view(4000, 1000)}
    store = CheckpointStore(CheckpointOptions(checkpoint_asynchronous=False))
    store.save(str(bucket / "a"), {"global_step": 1, "state_dict": weights}, STATE, None, {})
    manifest = read_manifest(bucket / "a")
    tensors = TensorFolder(folder.contents(bucket / "a", manifest))
    Bucket.requests.clear()
    row = torch.empty(1, 1000)
    tensors.read_into({"model.weight": Slices((4000, 1000), {(2500, 0): row})})
    assert torch.equal(row[0], weights["weight"][2500])
    fetched = [size for what, name, size in Bucket.requests if what == "get"]
    assert sum(fetched) <= 3 * 256 * 1024 and len(fetched) <= 3, fetched


def test_many_small_tensors_take_few_requests(bucket: RemotePath) -> None:
    weights = {f"weight{i}": torch.full((50,), float(i)) for i in range(200)}
    store = CheckpointStore(CheckpointOptions(checkpoint_asynchronous=False))
    store.save(str(bucket / "a"), {"global_step": 1, "state_dict": weights}, STATE, None, {})
    tensors = TensorFolder(folder.contents(bucket / "a", read_manifest(bucket / "a")))
    Bucket.requests.clear()
    read = {f"model.{name}": torch.empty(50) for name in weights}
    tensors.read_into({name: Slices((50,), {(0,): tensor}) for name, tensor in read.items()})
    assert all(torch.equal(read[f"model.{name}"], tensor) for name, tensor in weights.items())
    assert len([what for what, _, _ in Bucket.requests if what == "get"]) <= 3, (
        "200 archives of 1.5 kB"
    )


# Damage


def test_f29_f31_damage_is_named(bucket: RemotePath) -> None:
    save_at(bucket / "step_1", 1)
    url = str(bucket / "step_1")
    data = folder.contents(bucket / "step_1", read_manifest(bucket / "step_1"))
    shard = on_disk(data / SHARD)
    contents = shard.read_bytes()
    flip_bit(shard)
    assert url in refusal_of(url) and f"{SHARD} has changed since it was saved" in refusal_of(url)
    shard.write_bytes(contents[:-1])
    assert f"{SHARD} has {len(contents) - 1} bytes instead of {len(contents)}" in refusal_of(url)
    shard.unlink()
    assert f"{SHARD} is missing in {url}" in refusal_of(url)
    flip_bit(on_disk(bucket / "step_1" / MANIFEST))
    assert MANIFEST in refusal_of(url)
    assert 'Did you mean "step_1"?' in refusal_of(str(bucket / "step_11"))
    on_disk(bucket / "step_1" / MANIFEST).unlink()
    assert "never finished" in refusal_of(url)


def test_f29_falls_back_if_asked(bucket: RemotePath) -> None:
    for step in (1, 2):
        save_at(bucket / f"step_{step}", step)
    flip_bit(on_disk(folder.contents(bucket / "step_2", read_manifest(bucket / "step_2")) / SHARD))
    with pytest.warns(
        UserWarning, match="step_2 is damaged.*Loading .*step_1 \\(step 1\\) instead"
    ):
        assert (
            CheckpointStore(CheckpointOptions(checkpoint_fall_back=True)).load(
                str(bucket / "step_2")
            )["global_step"]
            == 1
        )


# Failures and kills while it is written


@pytest.mark.parametrize("where", [SHARD, ".metadata", "trainer.json", MANIFEST])
def test_f32_a_failed_upload_leaves_what_was_there(where: str, bucket: RemotePath) -> None:
    save_at(bucket / "a", 1)
    Bucket.fails, Bucket.fails_after = where, 5000 if where == SHARD else 0
    with pytest.raises(StorageError, match="BrokenConnection: the other side went away"):
        save_at(bucket / "a", 2, numel=10_000)
    with pytest.warns(
        UserWarning,
        match="b could not be written; training continues without it: .*BrokenConnection",
    ):
        assert not save_at(bucket / "b", 2, mode=SaveMode.BACKGROUND, numel=10_000)
    assert step_of(str(bucket / "a")) == 1
    assert objects(bucket) == whole("a")
    Bucket.heal()
    save_at(bucket / "a", 3)
    assert step_of(str(bucket / "a")) == 3 and objects(bucket) == whole("a")


def test_f32_in_the_background_training_goes_on(bucket: RemotePath) -> None:
    folder_of_run: Any = bucket
    store = background(folder_of_run)
    assert save_at(bucket / "a", 1, store, mode=SaveMode.BACKGROUND)
    store.wait()
    Bucket.fails = SHARD
    assert save_at(bucket / "b", 2, store, mode=SaveMode.BACKGROUND)
    store.remove(str(bucket / "a"))
    with pytest.warns(UserWarning, match="b could not be written; training continues without it"):
        store.wait()
    assert step_of(str(bucket / "a")) == 1, "the only good one"
    Bucket.heal()
    assert save_at(bucket / "c", 3, store, mode=SaveMode.BACKGROUND)
    store.close()
    assert objects(bucket) == whole("c"), "a is removed now, and so is the marker of the run"


def killed_at(phase: str, path: RemotePath) -> None:
    kill = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    finish = TensorSave.finish
    patches: dict[str, tuple[Any, str, Any]] = {
        "before the first byte": (TensorSave, "plan", kill),
        "in an upload": (
            Bucket,
            "pipe_file",
            lambda system, name, *a, **k: kill() if SHARD in name else put(system, name, *a, **k),
        ),
        "before metadata": (
            TensorSave,
            "finish",
            lambda self, where, *more: (self.write(where), kill()),
        ),
        "before the manifest": (
            TensorSave,
            "finish",
            lambda self, where, *more: finish(self, where, kill),
        ),
        "after the manifest": (
            folder.remote,
            "remove_remains",
            lambda paths: kill() if (path / MANIFEST).is_file() and wrote else None,
        ),
    }
    put, wrote = Bucket.pipe_file, []
    publish = folder.remote.publish

    def published(where: RemotePath, manifest: bytes) -> None:
        wrote.append(where)
        publish(where, manifest)

    folder.remote.publish = published
    owner, name, replacement = patches[phase]
    setattr(owner, name, replacement)
    save_at(path, 2)


@pytest.mark.parametrize(
    "phase",
    [
        "before the first byte",
        "in an upload",
        "before metadata",
        "before the manifest",
        "after the manifest",
    ],
)
@pytest.mark.parametrize("replaces", [True, False], ids=["replaces", "new"])
def test_f27_a_kill_leaves_the_newest_complete_checkpoint(
    phase: str, replaces: bool, bucket: RemotePath
) -> None:
    save_at(bucket / "a", 1)
    path = bucket / ("a" if replaces else "b")
    child = os.fork()
    if child == 0:
        try:
            # the threads of a group that an earlier test left are not in this child
            torch.distributed.is_initialized = lambda: False
            killed_at(phase, path)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    committed = phase == "after the manifest"
    assert step_of(str(bucket / "a")) == (2 if replaces and committed else 1)
    assert [found.name for found in checkpoints_in(bucket)] == (
        ["a"] if replaces or not committed else ["b", "a"]
    )
    store = CheckpointStore(CheckpointOptions(checkpoint_asynchronous=False))
    store.hold([str(bucket)])
    save_at(bucket / "c", 3, store)
    store.close()
    assert objects(bucket) == whole("a", "c", *(["b"] if committed and not replaces else [])), (
        "nothing of the killed save is left"
    )


def test_a_listing_that_lags_behind_loses_nothing(bucket: RemotePath) -> None:
    """Files are asked for by name where a listing does not show them; what it hides of old saves
    stays until a later save."""
    Bucket.lag = 60
    save_at(bucket / "a", 1)
    save_at(bucket / "a", 2)
    assert step_of(str(bucket / "a")) == 2
    Bucket.heal()
    save_at(bucket / "a", 3)
    assert step_of(str(bucket / "a")) == 3 and objects(bucket) == whole("a")


def test_what_is_not_ours_stays(bucket: RemotePath) -> None:
    mine = on_disk(bucket / "a" / "data-00001")
    mine.parent.mkdir(parents=True)
    mine.write_text("a data set")
    save_at(bucket / "a", 1)
    save_at(bucket / "a", 2)
    assert mine.read_text() == "a data set"


# Two runs


HOLD = """
import sys, time
import object_store
from lightning_3d.storage import lock
from lightning_3d.storage.remote_path import RemotePath
object_store.register()
lock._RENEWED_SECONDS = 0.1
if len(sys.argv) > 2:
    lock._machine = lambda: sys.argv[2]
lock = lock.Lease(RemotePath(sys.argv[1]), 0)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other_run(
    bucket: RemotePath, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLD, str(bucket), *getattr(request, "param", [])]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        yield other
    finally:
        other.kill()
        other.wait()


def test_f37_two_runs_cannot_write_to_one_folder(
    bucket: RemotePath, other_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        CheckpointError, match=f"{bucket} belongs to another run.*process {other_run.pid}"
    ):
        Lease(bucket, patience_seconds=0)
    other_run.kill()
    other_run.wait()
    store = CheckpointStore()  # this machine knows that it is gone
    store.hold([str(bucket)])
    save_at(bucket / "a", 1, store)
    store.close()
    assert objects(bucket) == whole("a")


@pytest.mark.slow
@pytest.mark.parametrize("other_run", [["another machine"]], indirect=True)
def test_f37_a_run_that_was_killed_elsewhere_is_found_dead(
    bucket: RemotePath, other_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_DEAD_SECONDS", 2.0)
    other_run.kill()
    other_run.wait()
    Lease(bucket, patience_seconds=0).release()
    assert not on_disk(bucket).exists()


def test_f37_a_run_that_was_taken_for_dead_writes_no_more(
    bucket: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_RENEWED_SECONDS", 0.1)
    store = CheckpointStore(CheckpointOptions(checkpoint_asynchronous=False))
    store.hold([str(bucket)])
    save_at(bucket / "a", 1, store)
    marker = on_disk(bucket / ".lightning_3d.lock")
    deadline = time.monotonic() + 60
    while True:  # the run may be writing its own just now
        marker.write_text(json.dumps({"token": "another", "host": "b", "process": 1}))
        try:
            save_at(bucket / "b", 2, store)
        except CheckpointError as error:
            assert "Another run took over" in str(error)
            break
        assert time.monotonic() < deadline
    store.close()
    assert json.loads(marker.read_text())["token"] == "another" and step_of(str(bucket / "a")) == 1


def test_f37_saves_elsewhere_take_turns(bucket: RemotePath) -> None:
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda step=step: results.append(save_at(bucket / f"{step}", step)))
        for step in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 3 and objects(bucket) == whole("1", "2", "3")


def test_the_only_good_one_is_not_removed(bucket: RemotePath) -> None:
    store = CheckpointStore(CheckpointOptions(checkpoint_asynchronous=False))
    save_at(bucket / "a", 1, store)
    with pytest.warns(UserWarning, match="newest complete checkpoint"):
        store.remove(str(bucket / "a"))
    assert step_of(str(bucket / "a")) == 1
    save_at(bucket / "b", 2, store)
    assert objects(bucket) == whole("b")


# A model in training, on several ranks


def fit_at(
    url: str, layout: str, epochs: int, resume: str | None, **more: Any
) -> tuple[list[float], str]:
    """The loss of every step, and what was seen of the folder when it was over."""
    register()
    values, callback = (
        StepValues(),
        ModelCheckpoint(f"{url}/best", monitor="val_loss", save_top_k=1, save_last=True),
    )
    trainer, rows = make_trainer(layout, epochs, [values, callback], **more)
    trainer.fit(TiedModel(), datamodule=rows, ckpt_path=resume)
    trainer.save_checkpoint(f"{url}/end.ckpt")
    return values.losses, callback.best_model_path


@pytest.mark.slow
def test_a_fit_saves_and_resumes_at_a_url(bucket: RemotePath) -> None:
    """Asynchronously, by `ModelCheckpoint`, "last" and a path; on another layout and ZeRO stage;
    with no more than asked for left."""
    whole_run = run_ranks(fit_at, 4, str(bucket / "x"), "tp2_pp2", 2, None)[0][0]
    first, best = run_ranks(fit_at, 4, str(bucket), "tp2_pp2", 1, None)[0]
    assert first == whole_run[: len(first)] and best.startswith(str(bucket / "best"))
    assert sorted(found.name for found in checkpoints_in(bucket / "best")) == sorted(
        [best.rpartition("/")[2], "last.ckpt"]
    )
    text = "\n".join(describe(bucket / "end.ckpt"))
    assert (
        "written by  tp2_pp2, 1F1B, ZeRO-0" in text
        and "complete    yes: every file matches its hash" in text
    )
    again = run_ranks(fit_at, 2, str(bucket), "dp2", 2, "last", zero_stage=2)[0][0]
    assert again == pytest.approx(whole_run[len(first) :], rel=1e-5)
    assert not list(on_disk(bucket).rglob("*.lock")), "nobody holds anything any more"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_command_line_trains_and_goes_on_at_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dir://` is a backend of fsspec for a folder, here one of the local disk."""
    monkeypatch.setenv("FSSPEC_DIR_PATH", str(tmp_path / "store"))
    monkeypatch.setenv("FSSPEC_DIR_TARGET_PROTOCOL", "file")
    (tmp_path / "store").mkdir()

    at = "dir://run/checkpoints"

    def train(name: str, *more: str) -> list[str]:
        length = ["trainer.val_check_interval=2", "trainer.checkpoint_every_n_steps=2"]
        return [
            "train",
            *QUICK,
            *length,
            f"callbacks.checkpoint.dirpath={at}",
            f"hydra.run.dir={tmp_path / name}",
            *more,
        ]

    first, again, shown, exported, resumed = run_commands(
        [
            train("a", "trainer.max_steps=4"),
            train("a", "trainer.max_steps=6", "trainer.auto_resume=true"),
            ["inspect", f"{at}/step_4.ckpt"],
            ["export", at, "--output", str(tmp_path / "model")],
            train(
                "b", "trainer.max_steps=8", f"trainer.resume={at}/step_6.ckpt", "parallelism=tp2"
            ),
        ],
        timeout=800,
    )
    refused = [
        "trainer.resume=dir://run/checkpoints/step_9.ckpt",
        "callbacks.checkpoint.dirpath=dropbox://b/c",
        "trainer.resume=nothing://b/c",
    ]
    missing, uninstalled, unknown = run_commands(
        [train("c", override) for override in refused], timeout=120
    )
    for done in (first, again, shown, exported, resumed):
        assert done.code == 0, done.output
    assert "resuming from dir://run/checkpoints/step_4.ckpt" in again.output
    assert "step        4" in shown.output and "complete    yes" in shown.output
    assert (tmp_path / "model" / "model.safetensors").is_file()
    steps = [4, 6, 8]  # the newest three are kept
    assert sorted(path.name for path in (tmp_path / "store" / "run" / "checkpoints").iterdir()) == [
        f"step_{step}.ckpt" for step in steps
    ]
    for result, words in (
        (missing, f"There is no checkpoint {at}/step_9.ckpt to resume from"),
        (
            uninstalled,
            (
                "checkpoint.dirpath=dropbox://b/c: dropboxdrivefs is not installed. Install it with"
                " pip install dropboxdrivefs"
            ),
        ),
        (unknown, 'nothing://b/c: fsspec does not support "nothing://"'),
    ):
        assert result.code == 2 and words in result.output, result.output
        assert not result.torch and "Traceback" not in result.output
    assert not (tmp_path / "c").exists()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_f27_a_run_that_is_killed_in_a_save_goes_on_at_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSSPEC_DIR_PATH", str(tmp_path / "store"))
    monkeypatch.setenv("FSSPEC_DIR_TARGET_PROTOCOL", "file")
    (tmp_path / "store").mkdir()
    length = [
        "trainer.max_steps=6",
        "trainer.val_check_interval=2",
        "trainer.checkpoint_every_n_steps=2",
    ]
    line = [
        "train",
        *QUICK,
        *length,
        "callbacks.checkpoint.dirpath=dir://run",
        f"hydra.run.dir={tmp_path / 'a'}",
    ]
    ambush = [
        f"+callbacks.faulty.{name}"
        for name in ("_target_=faulty.KillInSave", "phase='in a shard'", "rank=1", "everyone=true")
    ]
    [killed] = run_commands([[*line, *ambush]], timeout=400)
    assert "SIGKILL" in killed.output, killed.output
    [again] = run_commands([[*line, "trainer.auto_resume=true"]], timeout=400)
    assert again.code == 0 and "resuming from dir://run/step_2.ckpt" in again.output, again.output
    run = tmp_path / "store" / "run"
    assert sorted(path.name for path in run.iterdir()) == [
        "step_2.ckpt",
        "step_4.ckpt",
        "step_6.ckpt",
    ]
    assert [len(list(path.iterdir())) for path in run.iterdir()] == [
        2,
        2,
        2,
    ], "a manifest and the folder that it names"
