"""For all tests: the warm pool of ranks, the length of runs that are compared, and the parity table
at the end of a session."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import skips
from hypothesis import settings
from ranks import POOL, run_ranks

# A failed assertion in a helper shows its values, as one in a test file does.
SUPPORT = Path(__file__).parent / "support"
pytest.register_assert_rewrite(
    *(file.stem for file in SUPPORT.glob("*.py") if file.stem not in sys.modules)
)


def pytest_configure(config: pytest.Config) -> None:
    """Runs of 2 steps by default, of 5 in the long sweeps, so that these end within hours: ranks
    inherit it. The second step shows a wrong update or a gradient that was kept, and the weights
    after it show a wrong state of the optimizer."""
    config.pluginmanager.register(skips, "lightning_3d_skips")
    os.environ.setdefault(
        "PARITY_STEPS",
        (
            "2"
            if "not full" in config.option.markexpr or config.option.markexpr in ("cuda", "gpu")
            else "5"
        ),
    )
    # As many test processes as cores: more threads each would only wait for one another. Ranks have
    # one thread, too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # No default test may assert a wall-clock time: an example takes long on a machine that does
    # something else as well.
    settings.register_profile("lightning_3d", deadline=None)
    settings.load_profile("lightning_3d")
    # no lines about the progress of commands among what tests compare
    os.environ["LIGHTNING_3D_PROGRESS"] = "0"
    # Self-checks are remembered for this session only.
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lightning_3d_cache_")
    config.add_cleanup(lambda: shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True))


@pytest.fixture(autouse=True)
def _environment_restored() -> Iterator[None]:
    """A fit in this process sets variables, such as MASTER_ADDR, that would change what another
    test sees."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """``ranks(fn, world_size, *args, timeout=120, **kwargs) -> list``: see ``ranks.py``."""
    yield run_ranks
    POOL.close()


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder of a run on 8 ranks with what each of them had: step 3 was asked for to be traced,
    step 4 has the right number."""
    from traced import fit

    folder = tmp_path_factory.mktemp("traced")
    return folder, run_ranks(
        fit, 8, str(folder), "tp2_pp2_dp2", 4, zero_stage=1, process_group=False, timeout=240
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist hands its part of the parity table to the process that prints it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["parity"] = _parity_lines()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What that worker handed over; nothing if it died."""
    of_workers = node.config.stash.setdefault(OF_WORKERS, [])
    of_workers.extend(getattr(node, "workeroutput", {}).get("parity", []))


OF_WORKERS = pytest.StashKey[list[str]]()


def _parity_lines() -> list[str]:
    # a session without parity tests does not pay for importing Lightning
    parity = sys.modules.get("parity")
    return (
        [parity.HEADER, *(measured.line() for measured in parity.TABLE)]
        if parity is not None and parity.TABLE
        else []
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The parity table: a line per cell with the measured errors."""
    # the header once
    lines = list(
        dict.fromkeys([*_parity_lines(), *terminalreporter.config.stash.get(OF_WORKERS, [])])
    )
    if lines:
        terminalreporter.section("parity with one process")
        for line in lines:
            terminalreporter.line(line)
