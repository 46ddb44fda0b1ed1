"""Lines of backends in the log of a run: Hydra sets INFO for all loggers, but their lines about
each request are not shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from lightning_3d.storage.remote_path import RemotePath

NAMES = ("fsspec", "s3fs", "aiobotocore", "botocore", "gcsfs", "adlfs", "azure", "httpx", "httpx2")
LINES = (
    "botocore.credentials",
    "aiobotocore.credentials",
    "httpx2",
    "azure.core.pipeline.policies.http_logging_policy",
    "fsspec",
)


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Loggers as they are in a new process."""
    loggers = [logging.getLogger(name) for name in ("root", *NAMES)]
    before = [logger.level for logger in loggers]
    for logger in loggers[1:]:
        logger.setLevel(logging.NOTSET)
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def shown(caplog: pytest.LogCaptureFixture) -> set[tuple[str, int]]:
    """Loggers and levels of the lines that are shown after a request, of one line of each level by
    each logger."""
    assert not RemotePath("memory://backend_logs/missing").exists()
    caplog.clear()
    for name in LINES:
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(level, "a line")
    return {(record.name, record.levelno) for record in caplog.records}


def test_a_request_leaves_the_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Also if the first request comes before Hydra configures its logging."""
    logging.getLogger().setLevel(logging.WARNING)
    assert shown(caplog) == {(name, logging.WARNING) for name in LINES}
    logging.getLogger().setLevel(logging.INFO)
    assert shown(caplog) == {(name, logging.WARNING) for name in LINES}


def test_levels_that_a_user_sets_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("botocore").setLevel(logging.INFO)
    logging.getLogger("httpx2").setLevel(logging.ERROR)
    logging.getLogger("fsspec").setLevel(logging.DEBUG)
    chosen = {
        ("botocore.credentials", logging.INFO),
        ("fsspec", logging.DEBUG),
        ("fsspec", logging.INFO),
    }
    others = {(name, logging.WARNING) for name in LINES if name != "httpx2"}
    assert shown(caplog) == chosen | others


def test_debug_for_all_shows_everything(caplog: pytest.LogCaptureFixture) -> None:
    """What `hydra.verbose=true` sets."""
    logging.getLogger().setLevel(logging.DEBUG)
    assert shown(caplog) == {
        (name, level) for name in LINES for level in (logging.DEBUG, logging.INFO, logging.WARNING)
    }
