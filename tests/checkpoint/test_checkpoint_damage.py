"""What may happen to a checkpoint on disk: kills while it is written, damage afterwards, another
run. One process, no model."""

import errno
import hashlib
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_checkpoints import PlainState, background, flip_bit, refusal, save, tensors

from lightning_3d.app.training.run_record import same_run
from lightning_3d.checkpoint import (
    CheckpointStore,
    SaveMode,
    folder,
    load_full_state_dict,
    read_manifest,
)
from lightning_3d.checkpoint.folder import MANIFEST, TRAINER, TRAINER_TENSORS
from lightning_3d.checkpoint.hashes import FileSum, HashedFile
from lightning_3d.checkpoint.store import BackgroundSave
from lightning_3d.checkpoint.writing import METADATA_FILE, TensorSave
from lightning_3d.errors import CheckpointError, StorageError
from lightning_3d.options.checkpoints import CheckpointOptions
from lightning_3d.storage.checkpoint_names import checkpoints_in
from lightning_3d.storage.lock import FolderLock

SHARD = "__0_0.distcp"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path / "step_1", 1)
    return tmp_path / "step_1"


def step_of(path: Path) -> int:
    """The step of a whole checkpoint, by its manifest and by its tensors."""
    step = read_manifest(path)["global_step"]
    assert torch.equal(load_full_state_dict(path)["weight"], tensors(step)["weight"])
    return step


def test_what_was_saved_is_loaded(checkpoint: Path) -> None:
    found = load_full_state_dict(checkpoint)
    assert found.keys() == tensors(1).keys() and all(
        torch.equal(found[name], tensor) for name, tensor in tensors(1).items()
    )
    loaded = CheckpointStore().load(checkpoint)
    assert (loaded["global_step"], loaded["note"].tolist()) == (1, [1.0, 1.0, 1.0])
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(
        [METADATA_FILE, SHARD, TRAINER, TRAINER_TENSORS, MANIFEST]
    )


def test_hashes_are_those_of_sha256sum(checkpoint: Path) -> None:
    for name, known in read_manifest(checkpoint)["files"].items():
        assert (
            known["sha256"]
            == subprocess.run(
                ["sha256sum", checkpoint / name], capture_output=True, text=True
            ).stdout.split()[0]
        )


# Damage. Each message names the file, and the exit code of each is that of a refusal.


@pytest.mark.parametrize("where", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("name", [SHARD, METADATA_FILE, TRAINER, TRAINER_TENSORS, MANIFEST])
def test_f30_one_flipped_bit_is_found(name: str, where: float, checkpoint: Path) -> None:
    flip_bit(checkpoint / name, where)
    assert str(checkpoint) in refusal(checkpoint) and name in refusal(checkpoint)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_full_state_dict(checkpoint)


def test_f30_without_hashes_the_reader_of_a_damaged_file_names_it(checkpoint: Path) -> None:
    flip_bit(checkpoint / TRAINER_TENSORS, 0.1)
    assert str(checkpoint / TRAINER_TENSORS) in refusal(
        checkpoint, CheckpointStore(CheckpointOptions(checkpoint_verify=False))
    )


def test_f30_verification_can_be_left_out(checkpoint: Path) -> None:
    flip_bit(checkpoint / TRAINER_TENSORS, 1.0)
    assert CheckpointStore(CheckpointOptions(checkpoint_verify=False)).load(checkpoint)[
        "note"
    ].tolist() != [1.0, 1.0, 1.0]


FILES = [SHARD, METADATA_FILE, TRAINER, TRAINER_TENSORS]


@pytest.mark.parametrize("name", FILES)
def test_f29_a_truncated_file_is_found(name: str, checkpoint: Path) -> None:
    size = (checkpoint / name).stat().st_size
    os.truncate(checkpoint / name, size - 1)
    assert f"{name} has {size - 1} bytes instead of {size}" in refusal(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_f31_a_missing_file_is_named(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    assert f"The file {name} is missing in {checkpoint}" in refusal(checkpoint)


def test_f22_a_file_that_leads_outside_is_not_read(checkpoint: Path) -> None:
    elsewhere = checkpoint.with_name("elsewhere")
    (checkpoint / TRAINER_TENSORS).rename(elsewhere)
    (checkpoint / TRAINER_TENSORS).symlink_to(elsewhere)
    assert f"names '{TRAINER_TENSORS}', which is outside its folder" in refusal(checkpoint)
    moved = checkpoint.with_name("moved")  # the folder itself may be a link
    elsewhere.replace(checkpoint / TRAINER_TENSORS)
    moved.symlink_to(checkpoint)
    assert CheckpointStore(CheckpointOptions()).load(moved)["note"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", FILES)
def test_f22_a_link_to_itself_is_refused_with_one_message(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to(checkpoint / name)
    assert f"{name}" in refusal(checkpoint)


def test_f28_what_is_no_checkpoint_is_named(checkpoint: Path) -> None:
    assert 'Did you mean "step_1"?' in refusal(checkpoint.with_name("step_11"))
    link = checkpoint.with_name("last")
    link.symlink_to(checkpoint.with_name("step_9"))
    assert f"{link} points to {checkpoint.with_name('step_9')}, which does not exist" in refusal(
        link
    )
    (checkpoint / MANIFEST).unlink()
    assert "never finished" in refusal(checkpoint)
    checkpoint.with_name("old").write_bytes(b"a file")
    assert "is a file" in refusal(checkpoint.with_name("old"))
    assert "pip install dropboxdrivefs" in refusal("dropbox://bucket/a.ckpt")  # type: ignore[arg-type]
    assert 'does not support "nothing://"' in refusal("nothing://bucket/a.ckpt")  # type: ignore[arg-type]
    assert "a chain of file systems" in refusal("simplecache::s3://bucket/a.ckpt")  # type: ignore[arg-type]


def test_f28_for_a_folder_of_checkpoints_its_newest_is_named(tmp_path: Path) -> None:
    for step in (9, 10):
        save(tmp_path / "checkpoints" / f"step_{step}", step)
    for given in (tmp_path, tmp_path / "checkpoints"):
        assert refusal(given).endswith(f" Did you mean {tmp_path}/checkpoints/step_10?")


def test_a_folder_that_may_not_be_read_is_named(checkpoint: Path) -> None:
    checkpoint.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:  # root may read everything
            os.chmod(checkpoint.parent, 0o755)
            os.seteuid(65534)
        message = refusal(checkpoint)
    finally:
        os.seteuid(user)
        checkpoint.chmod(0o755)
    assert str(checkpoint) in message and "Permission denied" in message


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def sign(path: Path) -> None:
    """Write a manifest that fits the files, as one could who wants a damaged checkpoint to be
    loaded."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"] = {name: vars(FileSum.of(path / name)) for name in manifest["files"]}
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_f34_a_pickle_with_code_is_not_run(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the table of contents, and in the archive of a tensor: hashes are no signatures."""
    monkeypatch.chdir(tmp_path)
    evil, table = pickle.dumps(Evil(), protocol=2), (checkpoint / METADATA_FILE).read_bytes()
    (checkpoint / METADATA_FILE).write_bytes(evil)
    sign(checkpoint)
    with pytest.raises(CheckpointError, match=r"\.metadata was not loaded: it contains"):
        load_full_state_dict(checkpoint)
    (checkpoint / METADATA_FILE).write_bytes(table)
    shard = (checkpoint / SHARD).read_bytes()
    at = shard.find(b"\x80\x02ctorch._utils")  # what torch.load would unpickle
    shard = shard[:at] + evil + shard[at + len(evil) :]
    (checkpoint / SHARD).write_bytes(shard)
    sign(checkpoint)
    load_full_state_dict(checkpoint)
    assert not Path("executed").exists()
    pickle.loads(shard[at:])
    assert Path("executed").exists(), "it would have run"


def test_f29_weights_and_biases_goes_on_where_the_checkpoint_can_be_read(tmp_path: Path) -> None:
    checkpoint = {"global_step": 1, "epoch": 0, "state_dict": tensors(1), "wandb_run_id": "abc"}
    store = CheckpointStore(CheckpointOptions(checkpoint_asynchronous=False))
    store.save(tmp_path / "a", checkpoint, PlainState(), None, {"layout": "tp1"})  # type: ignore[arg-type]
    logger = {"wandb": {"_target_": "lightning.pytorch.loggers.WandbLogger"}}
    model = {"config": {"model_type": "llama"}}
    run = {
        "logger": logger,
        "model": model,
        "precision": {"name": "fp32"},
        "run_folder": str(tmp_path / "run"),
    }
    run["trainer"] = {"resume": str(tmp_path / "a")}
    assert same_run(run)["wandb"]["id"] == "abc"
    (tmp_path / "a" / SHARD).unlink()
    assert "id" not in same_run(run)["wandb"], "what is loaded instead is the loader's choice"


def test_f29_falls_back_only_if_asked(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step_{step}", step)
    flip_bit(tmp_path / "step_3" / SHARD)
    os.truncate(tmp_path / "step_2" / SHARD, 10)
    assert "step_3" in refusal(tmp_path / "step_3")
    with pytest.warns(
        UserWarning, match="step_3 is damaged.*Loading .*step_1 \\(step 1\\) instead"
    ):
        assert (
            CheckpointStore(CheckpointOptions(checkpoint_fall_back=True)).load(tmp_path / "step_3")[
                "global_step"
            ]
            == 1
        )
    flip_bit(tmp_path / "step_1" / SHARD)
    assert "step_3" in refusal(
        tmp_path / "step_3", CheckpointStore(CheckpointOptions(checkpoint_fall_back=True))
    )


# Kills and failures while a checkpoint is written


def killed_at(phase: str, path: Path, replaces: bool) -> None:
    """In a child process: save over what is at `path`, and be killed in a phase of that."""
    kill = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    patches: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "before the first byte": (folder, "begin", kill),
        "in a shard": (HashedFile, "write", write_and_kill_at(200)),
        "before metadata": (
            TensorSave,
            "finish",
            lambda self, where, commit, group: (self.write(where), kill()),
        ),
        "before the manifest": (folder, "commit", kill),
        "before the rename": (folder, "flush", kill),
        "after the rename": (
            folder,
            "_delete",
            lambda path: kill() if path.name.endswith("saving") and path.exists() else None,
        ),
    }
    if phase == "between two renames":
        folder._exchange = lambda first, second: False
        rename, calls = Path.rename, iter((rename_first, kill))
        Path.rename = lambda self, other: next(calls)(rename, self, other)  # type: ignore[method-assign]
    else:
        owner, name, replacement = patches[phase]
        setattr(owner, name, replacement)
    save(path, 2)


def rename_first(rename: Any, path: Path, other: Path) -> Path:
    return rename(path, other)


def write_and_kill_at(count: int) -> Callable[[HashedFile, bytes], int]:
    write = HashedFile.write

    def killing(self: HashedFile, data: bytes) -> int:
        if self.position + len(data) > count and str(self._file.name).endswith(".distcp"):
            self._file.write(bytes(data)[:count])
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, data)

    return killing


PHASES = [
    "before the first byte",
    "in a shard",
    "before metadata",
    "before the manifest",
    "before the rename",
]


@pytest.mark.parametrize(
    ("phase", "replaces"),
    [
        *(
            pytest.param(phase, True, id=f"replaces-{phase}")
            for phase in (*PHASES, "between two renames", "after the rename")
        ),
        # one rename, and nothing after it
        *(pytest.param(phase, False, id=f"new-{phase}") for phase in PHASES),
    ],
)
def test_f27_a_kill_leaves_the_newest_complete_checkpoint(
    phase: str, replaces: bool, tmp_path: Path
) -> None:
    save(tmp_path / "a", 1)
    path = tmp_path / ("a" if replaces else "b")
    child = os.fork()
    if child == 0:
        try:
            killed_at(phase, path, replaces)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    committed = phase in ("after the rename", "between two renames")
    if replaces:
        assert step_of(tmp_path / "a") == (2 if committed else 1)
    else:
        assert step_of(tmp_path / "a") == 1 and not path.exists()
        assert checkpoints_in(tmp_path) == [tmp_path / "a"]
    save(tmp_path / "c", 3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "a",
        "c",
    ], "nothing of the killed save is left"


@contextmanager
def small_disk() -> Iterator[None]:
    """Files cannot grow above 20 kB: writing to them fails as on a full disk, with another number.
    So do pytest's own, if it has any."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_f32_a_full_disk_leaves_the_last_one(tmp_path: Path) -> None:
    with small_disk():
        save(tmp_path / "a", 1)
        with pytest.raises(StorageError, match=f"{SHARD} could not be written: OSError"):
            save(tmp_path / "a", 2, numel=10_000)
        with pytest.warns(
            UserWarning, match=f"b could not be written; training continues without it: .*{SHARD}"
        ):
            assert not save(tmp_path / "b", 2, mode=SaveMode.BACKGROUND, numel=10_000)
        assert step_of(tmp_path / "a") == 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_f40_the_only_good_one_is_not_removed(tmp_path: Path) -> None:
    """As `ModelCheckpoint(save_top_k=1)` does it: save the next one, then remove the one before,
    whatever came of the save."""
    with small_disk():
        store = CheckpointStore(CheckpointOptions(checkpoint_asynchronous=False))
        assert save(tmp_path / "a", 1, store)
        with pytest.warns(UserWarning, match="could not be written"):
            assert not save(tmp_path / "b", 2, store, mode=SaveMode.BACKGROUND, numel=10_000)
        with pytest.warns(UserWarning, match="newest complete checkpoint"):
            store.remove(tmp_path / "a")
        store.remove(tmp_path / "b")
        assert step_of(tmp_path / "a") == 1
        assert save(tmp_path / "c", 3, store)
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"], "now the first is removed"
        save(tmp_path / "d", 4, store)
        (tmp_path / "d" / SHARD).unlink()
        with pytest.warns(UserWarning, match="newest complete checkpoint"):
            store.remove(tmp_path / "c")  # the other one is not whole
        assert step_of(tmp_path / "c") == 3


def test_f40_the_newest_good_one_is_not_removed_for_an_older_one(tmp_path: Path) -> None:
    """That which a run was resumed from stays in its folder. It is no reason to remove what came
    after it before the next is written."""
    store = CheckpointStore(CheckpointOptions(checkpoint_asynchronous=False))
    for name, step in (("resumed", 1), ("newest", 2)):
        save(tmp_path / name, step, store)
    with pytest.warns(UserWarning, match="newest complete checkpoint"):
        store.remove(tmp_path / "newest")
    assert step_of(tmp_path / "newest") == 2
    save(tmp_path / "next", 3, store)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "next",
        "resumed",
    ], "now it is removed"
    store.remove(tmp_path / "resumed")
    assert [entry.name for entry in tmp_path.iterdir()] == ["next"]


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    save(tmp_path / "run" / "a", 1)
    for wrong in (tmp_path / "run", tmp_path):
        with pytest.raises(
            CheckpointError, match=f"^{re.escape(str(wrong))} is a folder that is not a checkpoint"
        ):
            save(wrong, 2)
    (tmp_path / "empty").mkdir()
    assert save(tmp_path / "empty", 3) and step_of(tmp_path / "empty") == 3
    assert step_of(tmp_path / "run" / "a") == 1 and sorted(
        entry.name for entry in tmp_path.iterdir()
    ) == ["empty", "run"]


def test_what_cannot_be_removed_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where the folder of a file that somebody reads is never empty."""
    store = background(tmp_path)
    for step in (1, 2):
        save(tmp_path / f"step_{step}", step, store, mode=SaveMode.BACKGROUND)
    store.wait()

    def refuse(path: Path, *args: Any, **options: Any) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        store.remove(tmp_path / "step_1")
        for step in (3, 4):
            assert save(tmp_path / "last", step, store)
        assert (
            checkpoints_in(tmp_path) == [tmp_path / "last", tmp_path / "step_2"]
            and step_of(tmp_path / "last") == 4
        )
    with (
        monkeypatch.context() as patched,
        pytest.warns(UserWarning, match="step_2 could not be removed; training continues: OSError"),
    ):
        patched.setattr(Path, "rename", refuse)
        store.remove(tmp_path / "step_2")
    assert save(tmp_path / "step_5", 5, store)
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "last",
        "step_2",
        "step_5",
    ], "now they are removed"


# In the background


class Gate:
    """Lets writing begin when it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        write = TensorSave.write
        monkeypatch.setattr(
            TensorSave, "write", lambda save, folder: self.opened.wait(60) and write(save, folder)
        )


def test_f38_a_save_in_the_background_does_not_see_later_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, store = Gate(monkeypatch), background(tmp_path)
    for step in (1, 2):
        weights = tensors(step)
        gate.opened.clear()
        checkpoint = {"global_step": step, "state_dict": weights}
        assert store.save(
            tmp_path / f"step_{step}", checkpoint, PlainState(), None, {}, mode=SaveMode.BACKGROUND
        )  # type: ignore[arg-type]
        assert not (tmp_path / f"step_{step}").exists()
        weights["weight"].fill_(-1)
        gate.opened.set()
        store.wait()
        assert step_of(tmp_path / f"step_{step}") == step
    assert step_of(tmp_path / "step_1") == 1, "the copies of one save are the memory of the next"
    store.close()


def test_f33_f39_the_next_save_and_a_load_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, store = Gate(monkeypatch), background(tmp_path)
    save(tmp_path / "a", 1, store, mode=SaveMode.BACKGROUND)
    threading.Timer(0.2, gate.opened.set).start()
    save(tmp_path / "b", 2, store, mode=SaveMode.BACKGROUND)
    assert step_of(tmp_path / "a") == 1
    assert store.load(tmp_path / "b")["global_step"] == 2
    save(tmp_path / "c", 3, store, mode=SaveMode.BACKGROUND)
    store.close()
    assert step_of(tmp_path / "c") == 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b", "c"]


def test_f32_a_full_disk_in_the_background_is_told_at_the_next_save(tmp_path: Path) -> None:
    with small_disk():
        store = background(tmp_path)
        save(tmp_path / "a", 1, store, mode=SaveMode.BACKGROUND)
        save(tmp_path / "b", 2, store, mode=SaveMode.BACKGROUND, numel=10_000)
        store.remove(tmp_path / "a")
        with pytest.warns(
            UserWarning, match="b could not be written; training continues without it"
        ):
            store.wait()
        assert step_of(tmp_path / "a") == 1
        save(tmp_path / "c", 3, store, mode=SaveMode.BACKGROUND)
        store.close()
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


# Two runs


HOLD = """
import sys, time
from pathlib import Path
from lightning_3d.storage.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_f37_two_runs_cannot_write_to_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(
            CheckpointError, match=f"{tmp_path} belongs to another run.*process {other.pid}"
        ):
            FolderLock(tmp_path, patience_seconds=0)
        monkeypatch.setattr("lightning_3d.storage.lock._PATIENCE_SECONDS", 0)
        with pytest.raises(CheckpointError, match="belongs to another run"):
            CheckpointStore().hold([tmp_path])
    finally:
        other.kill()
        other.wait()
    store = CheckpointStore()
    store.hold([tmp_path, tmp_path / "not there yet"])  # who was killed holds nothing
    save(tmp_path / "a", 1, store)
    store.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_copy_elsewhere_is_as_good(checkpoint: Path, tmp_path: Path) -> None:
    shutil.move(checkpoint, tmp_path / "elsewhere")
    assert step_of(tmp_path / "elsewhere") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads")
def test_the_thread_that_writes_gives_way_to_training(tmp_path: Path) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []

    def finish() -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    save = BackgroundSave(tmp_path, TensorSave(), finish, lambda: None)
    save.join(60)
    assert save.error is None
    assert seen == [min(19, before + 10)] and os.getpriority(os.PRIO_PROCESS, 0) == before
