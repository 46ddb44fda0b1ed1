"""The commands of README and docs, as they are but for the number of steps, and Python blocks that
start ranks themselves."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import REPOSITORY, environment
from documented import ALL, FILES, Block, Command, commands, here, sandbox, train_arguments

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def starts_here(command: Command) -> bool:
    """Neither about the environment of a checkout, nor a benchmark, which has tests of its own."""
    return command.words[0] not in ("make", "pip") and not command.words[1].startswith(
        ("tools/", "benchmarks/")
    )


RUNNABLE = [
    command
    for block in ALL
    if block.language == "bash" and "needs" not in block.notes
    for command in commands(block)
]
COMMANDS = [
    command
    for command in RUNNABLE
    if train_arguments(command.words) is not None or starts_here(command)
]
SCRIPTS = [
    block
    for block in ALL
    if block.language == "python" and ("__main__" in block.text or "file" in block.notes)
]
LIGHTNING_3D = [sys.executable, "-m", "lightning_3d"]

PLAIN_LIGHTNING = """
import yaml
from lightning.pytorch import Trainer
from lightning_3d.app.training.module import CausalLM
from lightning_3d.app.training.run import make_data
config = yaml.safe_load(open("runs/a/config.yaml"))
trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False, limit_val_batches=0)
trainer.fit(CausalLM(config["model"], config["optimizer"]), datamodule=make_data(config))
trainer.save_checkpoint("runs/ddp/epoch=3.ckpt")
"""  # noqa: E501


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what commands name: runs, a sweep and checkpoints of before."""
    folder = sandbox(tmp_path_factory.mktemp("commands"))
    train = [
        *LIGHTNING_3D,
        "train",
        "parallelism=dp2",
        "trainer.max_steps=1",
        "trainer.limit_val_batches=1",
    ]
    for where in ("outputs/2026-01-31/12-00-00", "runs/a"):
        start([*train, f"hydra.run.dir={where}"], folder)
    (made,) = (folder / "runs" / "a" / "checkpoints").glob("*.ckpt")
    shutil.copytree(made, made.with_name("step_1000.ckpt"))
    tuned = [
        "model=pretrained",
        "model.pretrained=models/Llama-3.1-8B",
        "data=tokens",
        "data.train_path=corpus.bin",
    ]
    start(
        [*train, *tuned, "data.sequence_length=64", "hydra.run.dir=outputs/2026-11-22/12-00-00"],
        folder,
    )
    start(
        [*train, "-m", "optimizer.lr=1e-3,1e-4", "hydra.sweep.dir=multirun/2026-11-22/12-00-00"],
        folder,
    )
    start([sys.executable, "-c", PLAIN_LIGHTNING], folder)
    return folder


def start(words: list[str], folder: Path, variables: dict[str, str] | None = None) -> None:
    variables = environment() if variables is None else variables
    done = subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, (
        f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )


def real(command: Command, folder: Path) -> list[str]:
    """Program and arguments to start for a command, with fewer steps."""
    words = here(command.words, folder)
    arguments = train_arguments(words)
    if arguments is not None:
        less = ["trainer.max_steps=2", "trainer.limit_val_batches=1"]
        less += ["data.sequence_length=64"] if "data=tokens" in arguments else []
        less += (
            ["trainer.trace_every_n_steps=2"]
            if any("trace_every" in word for word in arguments)
            else []
        )
        less += (
            ["hydra.sweeper.n_trials=2"] if any("n_trials" in word for word in arguments) else []
        )
        less = [] if set(arguments) & {"--help", "--cfg", "trainer.dry=true"} else less
        return [sys.executable, str(REPOSITORY / "train.py"), *arguments, *less]
    if words[0] == "lightning-3d":
        dry = ["--dry"] if words[1] == "launch" and "--dry" not in words else []
        return [*LIGHTNING_3D, *words[1:], *dry]
    if words[0] == "python" and words[1] in FILES:
        return [sys.executable, *words[1:]]
    raise AssertionError(f"this test cannot start {shlex.join(words)}")


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, id=re.sub(r"[^\w.=,:-]+", " ", command.name)) for command in COMMANDS],
)
def test_command(command: Command, prepared: Path) -> None:
    start(real(command, prepared), prepared)


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in SCRIPTS])
def test_script(block: Block, tmp_path: Path) -> None:
    given = (
        f"from documented_names import made\nglobals().update(made({block.given!r}))\n"
        if block.given
        else ""
    )
    (tmp_path / "block.py").write_text(given + block.text)
    variables = environment()
    del variables["OMP_NUM_THREADS"]  # a user does not set it
    start([sys.executable, "block.py"], tmp_path, variables)
