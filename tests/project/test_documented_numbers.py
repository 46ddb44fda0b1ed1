"""Tables of the documentation whose numbers a command prints."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import REPOSITORY, environment, run_commands

from lightning_3d.layout.layout import Layout


def rows_after(page: str, comment: str) -> list[list[str]]:
    """Cells of the table that follows a comment, without its head. Code has no backticks."""
    text = (
        (REPOSITORY / "docs" / page)
        .read_text("utf-8")
        .partition(f"<!-- {comment} -->\n\n")[2]
        .partition("\n\n")[0]
    )
    lines = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
    ]
    return lines[2:]


@pytest.mark.slow
def test_memory_of_each_option() -> None:
    """A run that needs more than the GPU has prints the table, so the GPU gets almost nothing."""
    rows = rows_after("memory.md", "memory of llama3_70b")
    assert len(rows) == 9
    commands = []
    for options, gpus, *_ in rows:
        layout = re.search(r"parallelism=(\w+)", options)
        assert layout and Layout.parse(layout[1]).world_size == int(gpus)
        batch = [
            "data=tokens",
            "data.sequence_length=4096",
            "data.global_batch_size=512",
            "parallelism.micro_batch_size=1",
        ]
        cluster = [
            f"cluster=h100_{int(gpus) // 8}x8",
            "cluster.memory=1.0e+9",
            "precision=bf16",
            "trainer.dry=true",
        ]
        commands.append(["train", "model=llama3_70b", *batch, *cluster, *options.split()])
    for (options, _, *shown), done in zip(rows, run_commands(commands), strict=True):
        printed = dict(re.findall(r"^  (\w+) +([\d.]+) GiB$", done.output, re.MULTILINE))
        assert [
            printed[part] for part in ("weights", "gradients", "optimizer", "activations", "all")
        ] == shown, options


PLANS = rows_after("which_layout.md", "answers of the planner")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", PLANS, ids=lambda row: " ".join(row[:3]))
def test_answer_of_the_planner(row: list[str], tmp_path: Path) -> None:
    job, sequences, tokens, shown = row
    batch = [f"data.global_batch_size={sequences}", f"data.sequence_length={tokens}"]
    planned = [
        sys.executable,
        "-m",
        "lightning_3d",
        "plan",
        *job.split(),
        *batch,
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(planned, env=environment(), capture_output=True, text=True, check=True)
    *_, command = done.stdout.splitlines()
    assert (
        " ".join(word for word in shlex.split(command) if word.startswith("parallelism")) == shown
    )
