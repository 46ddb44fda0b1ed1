"""Pages to look at, each one file that asks no host for anything: `report.html` of a run, `sweep.html` of a sweep. Imports no torch.

`run` and `sweep` read what is in the folder and say what the page shows, `page` makes the file; in `assets` are templates, styles and the
scripts that draw.
"""

from lightning_3d.runs.report.run import REPORT_FILE, About, write_report
from lightning_3d.runs.report.sweep import SWEEP_REPORT_FILE, write_sweep_report

__all__ = ["REPORT_FILE", "SWEEP_REPORT_FILE", "About", "write_report", "write_sweep_report"]
