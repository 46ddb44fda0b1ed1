"""Lines of other libraries that are printed once or not at all."""

import logging
import subprocess
import sys

import pytest

import lightning_3d  # noqa: F401
from lightning_3d.compat.log_lines import drop_lines


@pytest.mark.parametrize(
    ("name", "line", "kept"),
    [
        ("torchao", "Failed to load /x/_C.so: Could not load this library: /x/_C.so", False),
        ("torchao", "Skipping import of cpp extensions due to incompatible torch version.", False),
        ("torchao", "This quantization is deprecated.", True),
        (
            "torchao.kernel.intmm",
            "Warning: Detected no triton, on systems without Triton certain kernels will not work",
            False,
        ),
        (
            "torch.utils._pytree",
            (
                "<enum 'KernelPreference'> is an Enum subclass and is now natively supported by"
                " torch.compile"
            ),
            False,
        ),
        ("torch.utils._pytree", "something else", True),
        ("lightning.fabric.utilities.seed", "Seed set to 42", True),
        ("lightning.fabric.utilities.seed", "[rank: 0] Seed set to 42", True),
        ("lightning.fabric.utilities.seed", "[rank: 12] Seed set to 42", False),
    ],
)
def test_only_known_lines_are_dropped(name: str, line: str, kept: bool) -> None:
    drop_lines()  # again, which changes nothing
    logger = logging.getLogger(name)
    record = logger.makeRecord(
        name,
        logging.WARNING,
        __file__,
        1,
        line.replace("42", "%d"),
        (42,) if "42" in line else (),
        None,
    )
    assert bool(logger.filter(record)) is kept


@pytest.mark.slow
def test_seeds_are_printed_by_rank_0_alone() -> None:
    program = """
import os, sys
import lightning_3d
from lightning.fabric import seed_everything
for rank in (None, "0", "3"):
    os.environ.update({"RANK": rank} if rank else {})
    seed_everything(40 + int(rank or 2))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert [
        line.rpartition("] ")[2] for line in done.stderr.splitlines() if "Seed set" in line
    ] == ["Seed set to 42", "Seed set to 40"]


@pytest.mark.full
def test_torchao_imports_without_a_line() -> None:
    """Without `drop_lines` it prints some, or they can go. With a handler of the root logger, as
    Hydra sets one."""
    pytest.importorskip("torchao")
    program = "import logging; logging.basicConfig(); {}import torchao.float8"
    quiet, loud = (
        subprocess.run(
            [sys.executable, "-c", program.format(first)],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for first in ("import lightning_3d; ", "")
    )
    assert "_pytree" in loud and "torchao" not in quiet and "_pytree" not in quiet
