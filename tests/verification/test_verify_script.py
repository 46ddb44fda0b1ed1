"""`lightning-3d verify SCRIPT`: right scripts are the same as plain Lightning, and each kind of
fault is found and named."""

import os
import signal
import subprocess
import sys
import time
from collections import UserList
from dataclasses import dataclass
from pathlib import Path

import faulty_scripts as scripts
import pytest
from command_line import REPOSITORY, environment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from planted_scripts import PLANTED, Planted

from lightning_3d.app.cli.verify import split_script
from lightning_3d.app.verification.advice import COUNTED, PARTS, READING, ROWS, VALUES, WRITTEN
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.options.options import Options
from lightning_3d.ranks.role import ALONE, RANKS, Role, script_words
from lightning_3d.strategy.recorded.arguments import trainer_arguments
from lightning_3d.strategy.role_arguments import changed_options

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Verified:
    """How a verification ended, and the files that it left in its folder."""

    code: int
    output: str
    left: list[str]


def verified(
    folder: Path,
    text: str,
    *words: str,
    command: tuple[str, ...] = ("-m", "lightning_3d", "verify"),
    **more: str,
) -> Verified:
    """Verify a script in an empty folder, with everything that it prints."""
    (folder / "mine.py").write_text(text)
    line = [sys.executable, *command, "mine.py", *words]
    done = subprocess.run(
        line,
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    left = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "mine.py"
    )
    return Verified(done.returncode, done.stdout + done.stderr, left)


@pytest.mark.parametrize(
    ("line", "own", "script"),
    [
        (["mine.py", "--rows", "4"], [], ["mine.py", "--rows", "4"]),
        (["--steps", "2", "mine.py", "a"], ["--steps", "2"], ["mine.py", "a"]),
        (["mine.py", "a", "--steps=2", "b"], ["--steps=2"], ["mine.py", "a", "b"]),
        (
            ["mine.py", "--steps", "2", "--", "--steps", "9"],
            ["--steps", "2"],
            ["mine.py", "--steps", "9"],
        ),
        (["-m", "project.train", "x"], [], ["-m", "project.train", "x"]),
        (["parallelism=tp2", "data.file=x.py"], ["parallelism=tp2", "data.file=x.py"], []),
        (["--steps", "2", "parallelism=tp2"], ["--steps", "2", "parallelism=tp2"], []),
    ],
)
def test_words_of_a_script(line: list[str], own: list[str], script: list[str]) -> None:
    assert split_script(line) == (own, script)


def test_a_script_is_found_in_its_own_command_line() -> None:
    assert script_words(["python", "-u", "mine.py", "a", "b"], ["mine.py", "a", "b"]) == [
        "mine.py",
        "a",
        "b",
    ]
    assert script_words(["python", "-m", "project.train", "a"], ["/project/train.py", "a"]) == [
        "-m",
        "project.train",
        "a",
    ]
    with pytest.raises(ConfigError, match="needs a script"):
        script_words(["python", "-c", "pass"], ["-c"])


def test_lists_of_any_class_in_the_arguments_of_a_trainer(tmp_path: Path) -> None:
    """Hydra gives lists of a class of its own."""
    mine = Callback()
    given = {
        "callbacks": UserList([mine, ModelCheckpoint()]),
        "devices": UserList([0, 1]),
        "accelerator": "cpu",
    }
    changed = trainer_arguments(given, Role(RANKS, tmp_path, 2), None)
    assert changed["callbacks"] == [mine] and changed["devices"] == 2


@pytest.mark.slow
def test_a_script_that_asks_for_its_verification(tmp_path: Path) -> None:
    """It has dropout and noise in the step, and would print and write after its fit."""
    found = verified(
        tmp_path, scripts.script(scripts.RIGHT), "pp2", command=(), LIGHTNING_3D_VERIFY="1"
    )
    assert found.code == 0, found.output
    assert "same: pp2" in found.output and "(3 steps)" in found.output
    assert "after the fit" not in found.output and found.left == []


RIGHT = [
    (scripts.RIGHT, "tp2"),
    (scripts.RIGHT, "tp2_pp2"),
    (scripts.PARTLY_TRAINED, "dp2"),
    (scripts.RIGHT + scripts.ZERO, "pp2_dp2"),
    (scripts.ACCUMULATED, "dp2"),
    (scripts.STREAM, "dp2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "layout"), RIGHT)
def test_right_scripts(tmp_path: Path, text: str, layout: str) -> None:
    found = verified(tmp_path, scripts.script(text), layout, "--steps", "2")
    assert found.code == 0, found.output
    assert "same: " in found.output and "val_loss" not in found.left and found.left == []


FAULTS = [
    ("penalty", scripts.UNWATCHED_READS + scripts.PENALTY, "pp2", "loss of step 1", PARTS),
    ("sum", scripts.UNPROVED + scripts.SUM, "pp2", "loss of step 1", ROWS),
    ("clipped", scripts.UNWATCHED_HOOKS + scripts.CLIPPED, "tp2", "of step 1", WRITTEN),
    ("weights", scripts.WEIGHTS, "tp2", "weight", WRITTEN),
    ("buffer", scripts.BUFFER, "dp2", "buffer seen of step 1", COUNTED),
    ("logged", scripts.LOGGED, "pp2", "logged value spread of step 1", VALUES),
    ("data", scripts.DATA, "dp2", "several data-parallel ranks read the same rows", READING),
]
"""Kind, script, layout, what is named as the first difference, and what it looks like."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text", "layout", "first", "looks_like"), FAULTS, ids=[fault[0] for fault in FAULTS]
)
def test_faults_are_named(
    tmp_path: Path, kind: str, text: str, layout: str, first: str, looks_like: str
) -> None:
    found = verified(tmp_path, scripts.script(text), layout, "--steps", "2")
    assert found.code == 1, found.output
    named = next(
        line for line in found.output.splitlines() if line.startswith("first difference: ")
    )
    assert first in named and f"looks like: {looks_like}" in found.output
    assert found.left == []


GROUPS = [PLANTED[first::4] for first in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", GROUPS, ids=[", ".join(planted.kind for planted in group) for group in GROUPS]
)
def test_each_fault_is_found_when_its_repair_is_switched_off(
    tmp_path: Path, group: list[Planted]
) -> None:
    kinds = [planted.kind for planted in group]
    line = [sys.executable, "-m", "verified_here", *kinds]
    done = subprocess.run(
        line,
        env=environment(XDG_CACHE_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


PLAIN = """
from lightning.pytorch import LightningModule, Trainer
Trainer(devices=1, logger=False, enable_checkpointing=False).fit(LightningModule())
"""

REFUSED = [
    ("no script", None, "", 'There is no script "none.py"'),
    ("no strategy", PLAIN, "", "no Lightning3DStrategy"),
    ("no fit", "print('nothing to do')\n", "", "ended without a step"),
    ("too large", scripts.script(""), "tp2_pp4_dp4", "at most 16"),
    ("refused", scripts.script('more = {"zero_stage": 5}'), "dp2", "refused, not compared"),
    (
        "failed",
        scripts.script("raise ValueError('a fault of the script')"),
        "dp2",
        "a fault of the script",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text", "layout", "says"), REFUSED, ids=[case[0] for case in REFUSED]
)
def test_what_cannot_be_compared(
    tmp_path: Path, kind: str, text: str | None, layout: str, says: str
) -> None:
    words = (layout,) if layout else ()
    line = (
        ("-m", "lightning_3d", "verify", "none.py")
        if text is None
        else ("-m", "lightning_3d", "verify")
    )
    found = verified(tmp_path, text or "", *words, command=line)
    assert found.code == 2 and says in found.output, found.output
    assert found.left == []


EXAMPLES = {
    "custom_module.py": (),
    "own_trainer.py": ("--layout", "tp2_pp2", "--devices", "4"),
    "lora.py": (),
    "mixture.py": (),
    "finetune.py": (),
    "lightning_cli.py": (
        *("fit", "--trainer.strategy=lightning_3d", "--trainer.strategy.layout=tp2_pp2"),
        *("--trainer.devices=4", "--trainer.accelerator=cpu"),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    line = [
        sys.executable,
        "-m",
        "lightning_3d",
        "verify",
        str(REPOSITORY / "examples" / name),
        *EXAMPLES[name],
    ]
    done = subprocess.run(
        line, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0 and "same: " in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_nothing_stays_behind_when_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(scripts.script("import time; time.sleep(60)"))
    line = [sys.executable, "-m", "lightning_3d", "verify", "mine.py", "dp2"]
    words = {**environment(), "LIGHTNING_3D_PROGRESS": "1"}
    with subprocess.Popen(
        line, cwd=tmp_path, env=words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None and "running the script" in process.stdout.readline()
        child = _wait_for_child(process.pid)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while _lives(child):
        assert time.monotonic() < deadline, "the script goes on"
        time.sleep(0.1)


def _wait_for_child(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    while not children.read_text().strip():
        time.sleep(0.1)
    return int(children.read_text().split()[0])


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{process}/stat").read_text().split()[2]


@pytest.mark.slow
def test_a_script_without_the_strategy_that_asks_for_its_verification(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("import lightning_3d\nprint('trained')\n")
    asked = environment() | {"LIGHTNING_3D_VERIFY": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=asked,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (
        done.returncode == 2 and "trained" in done.stdout and "nothing was verified" in done.stderr
    )


def test_devices_that_do_not_fit_the_layout_stay_as_they_are(tmp_path: Path) -> None:
    role, layout = Role("ranks", tmp_path, 3), Layout(pp=3)
    found = [
        trainer_arguments({"devices": given}, role, layout)["devices"]
        for given in (2, "2", [0, 1], "auto", -1, 3)
    ]
    assert found == [2, 2, 2, 3, 3, 3]


def test_a_run_of_one_rank_keeps_what_the_script_declares_of_its_loss(tmp_path: Path) -> None:
    ranks = Role(RANKS, tmp_path, 3)
    ranks.own.mkdir()
    (ranks.own / "facts.json").write_text('{"micro_batch_rows": 8}')
    changed = changed_options(Options("pp2", loss_reduction="accumulate"), Role(ALONE, tmp_path, 3))
    assert changed == Options(Layout(), loss_reduction="accumulate", micro_batch_size=8)
