"""Skipped tests, counted and named in the last lines of a session.

With `LIGHTNING_3D_NO_SKIPS=1`, which `.ci/run` sets, a session in which a test was skipped fails,
unless the test needs a browser: `.ci/run` installs one where it can, and where it cannot, that is
no fault of the tests.
"""

import os
from collections.abc import Iterator

import pytest

VARIABLE = "LIGHTNING_3D_NO_SKIPS"
NO_BROWSER = "there is no Chromium"
"""How the reason of a test starts that was skipped because no browser is installed."""

Skipped = dict[str, list[str]]
"""Names of the skipped tests by reason."""


def skipped(reporter: pytest.TerminalReporter) -> Skipped:
    """Collect the skipped tests of the session; a file that was skipped as a whole counts as one
    test."""
    found: Skipped = {}
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        found.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid)
    return found


def lines(found: Skipped) -> Iterator[str]:
    """The count, then a line per reason with the names of its tests; nothing without a skipped
    test."""
    count = sum(map(len, found.values()))
    if count:
        yield f"{count} {'test was' if count == 1 else 'tests were'} skipped:"
        yield from (f"  {reason}: {', '.join(names)}" for reason, names in found.items())


def forbidden(found: Skipped) -> Skipped:
    """The skipped tests that fail the session."""
    if os.environ.get(VARIABLE, "") in ("", "0"):
        return {}
    return {reason: names for reason, names in found.items() if not reason.startswith(NO_BROWSER)}


def reporter_of(config: pytest.Config) -> pytest.TerminalReporter | None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter if isinstance(reporter, pytest.TerminalReporter) else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = reporter_of(session.config)
    good = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if reporter is not None and good and forbidden(skipped(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# after the summary of failures, which pytest prints last
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield
    found = skipped(terminalreporter)
    for line in lines(found):
        terminalreporter.line(line)
    if not_allowed := sum(map(len, forbidden(found).values())):
        terminalreporter.line(
            f"{VARIABLE} is set: the session fails, because {not_allowed} of them should have run.",
            red=True,
        )
