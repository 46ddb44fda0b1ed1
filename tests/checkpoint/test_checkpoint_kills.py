"""f27: `kill -9` of one rank, or of all, in every phase of a save: the next start goes on from the
newest complete checkpoint.

12 kills by default, of which each phase has one of a random rank and one of all ranks; 112 more by
`make test-faults`.
"""

import os
import random
from pathlib import Path

import pytest
from command_line import run_commands
from faulty import KillInSave
from kills import Chain, run_chain
from parity import Cell
from quick_runs import QUICK
from saving import check_checkpoints
from starts import in_fresh_process
from sweeps import by_default

SEED = int(os.environ.get("FAULTS_SEED", random.randrange(10**6)))
SIX = tuple(phase for phase in KillInSave.PHASES if phase != "before the manifest")

SHORT = {
    "one rank, in the background": Chain(
        (Cell(dp=2, zero=2),), asynchronous=True, phases=SIX, everyone=(False,)
    ),
    "all ranks, at once": Chain((Cell(pp=2),), asynchronous=False, phases=SIX, everyone=(True,)),
}
LONG = [  # 14 kills each
    Chain((Cell(tp=2, dp=2, zero=1),), asynchronous=True),
    Chain((Cell(pp=2, dp=2, zero=0),), asynchronous=True, last=True),
    Chain((Cell(dp=4, zero=3),), asynchronous=False),
    Chain((Cell(tp=2, pp=2, zero=2),), asynchronous=True),
    Chain((Cell("mixtral", ep=2, dp=2, zero=1),), asynchronous=False, last=True),
    Chain((Cell("phi3", pp=2, schedule="Interleaved1F1B"),), asynchronous=True),
    Chain((Cell("mixtral", ep=2, dp=4, zero=3),), asynchronous=True),
    Chain(
        (Cell(tp=2, dp=2, zero=1), Cell(pp=2, dp=2), Cell(dp=4, zero=3), Cell(tp=2, pp=2, zero=2)),
        asynchronous=True,
        last=True,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("chain", by_default([*SHORT.values()], 1), ids=SHORT)
def test_f27_a_killed_run_goes_on_from_the_newest_complete_checkpoint(
    chain: Chain, tmp_path: Path
) -> None:
    print(f"FAULTS_SEED={SEED}")
    assert in_fresh_process(run_chain, chain, SEED, tmp_path) == 6


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(len(LONG)))
def test_f27_a_hundred_kills(number: int, tmp_path: Path) -> None:
    print(f"FAULTS_SEED={SEED}")
    assert in_fresh_process(run_chain, LONG[number], SEED + number, tmp_path, timeout=1700) == 14


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_f27_from_the_command_line(tmp_path: Path) -> None:
    """The supervisor ends the others, and `auto_resume` finds the newest."""
    shape = [
        "trainer.max_steps=8",
        "trainer.val_check_interval=8",
        "trainer.checkpoint_every_n_steps=2",
    ]
    runs = {
        everyone: ["train", *QUICK, *shape, f"hydra.run.dir={tmp_path / str(everyone)}"]
        for everyone in (False, True)
    }
    ambush = {"_target_": "faulty.KillInSave", "phase": "in a shard", "rank": "1"}
    lines = [
        [
            *run,
            *(
                f"+callbacks.faulty.{key}={value}"
                for key, value in {**ambush, "everyone": everyone}.items()
            ),
        ]
        for everyone, run in runs.items()
    ]
    for killed in run_commands(lines, timeout=400):
        assert killed.code == 1 and "killed by SIGKILL" in killed.output, killed.output
    again = run_commands([[*run, "trainer.auto_resume=true"] for run in runs.values()], timeout=400)
    for everyone, resumed in zip(runs, again, strict=True):
        folder = tmp_path / str(everyone) / "checkpoints"
        assert resumed.code == 0 and f"resuming from {folder / 'step_2.ckpt'}" in resumed.output, (
            resumed.output
        )
        left = [path.name for path in folder.iterdir()]
        assert "step_8.ckpt" in left and not [name for name in left if name.startswith(".")]
        assert check_checkpoints(folder.parent) == 8
