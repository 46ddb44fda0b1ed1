"""The report as text, at most 100 columns wide: the worst findings of each check first."""

from __future__ import annotations

import textwrap

from lightning_3d.app.doctor.examination import Report
from lightning_3d.app.doctor.findings import OK, UNKNOWN, VERDICTS, WARNING, WRONG, DoctorFinding
from lightning_3d.errors import listed, plural

WIDTH = 100
_VERDICT, _NAME = 8, 24


def show(report: Report) -> str:
    """Return the whole report."""
    blocks = [_heading(report)]
    for name, findings in report.findings.items():
        lines = [name]
        for finding in sorted(findings, key=lambda finding: VERDICTS.index(finding.verdict)):
            lines += _lines(finding)
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, _summary(report)])


def is_simulated(report: Report) -> bool:
    """Check whether the GPUs of the report call themselves simulated."""
    return any(finding.name == "simulated GPU" for finding in report.findings.get("GPUs", ()))


def _heading(report: Report) -> str:
    setup, places = report.setup, report.places
    kind = (
        ("simulated GPU" if is_simulated(report) else "GPU")
        if setup.accelerator == "gpu"
        else "CPU"
    )
    hosts = places.hosts
    names = listed(list(hosts)[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    text = (
        f"{plural(places.world_size, f'{kind} rank')} on {plural(len(hosts), 'host')} ({names}),"
        f" layout {setup.layout}"
    )
    return "\n".join(textwrap.wrap(f"{text}, cluster {setup.cluster.name}", WIDTH))


def _lines(finding: DoctorFinding) -> list[str]:
    """Wrap what was measured and what to do under the third column."""
    start = f"  {finding.verdict.ljust(_VERDICT)}{finding.name.ljust(_NAME)}"
    if not finding.name or len(finding.name) >= _NAME:
        start = f"  {finding.verdict.ljust(_VERDICT)}{finding.name}  "
    indent = " " * (2 + _VERDICT + _NAME)
    lines = _wrap(finding.measured, start, indent)
    return lines + (
        _wrap(f"-> {finding.advice}", indent, f"{indent}   ")
        if finding.advice and finding.verdict != OK
        else []
    )


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _summary(report: Report) -> str:
    verdicts = [finding.verdict for findings in report.findings.values() for finding in findings]
    wrong, warnings, unknown = (verdicts.count(verdict) for verdict in (WRONG, WARNING, UNKNOWN))
    words = [
        f"{wrong} wrong",
        plural(warnings, "warning"),
        f"{unknown} unknown",
        f"{verdicts.count(OK)} ok",
    ]
    end = "Nothing is wrong." if not warnings else "Nothing is wrong; read the warnings."
    if wrong:
        end = "Repair what is wrong before a run."
    return f"{', '.join(words)}, in {report.seconds:.0f} s. {end}"
