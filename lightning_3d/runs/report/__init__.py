"""Reports as single HTML files that load nothing from a network: `report.html` of a run, `sweep.html` of a sweep. Imports no torch.

`run` and `sweep` read the folder and choose what the page shows, `page` writes the file, `assets` has templates, styles and the scripts
that draw.
"""

from lightning_3d.runs.report.run import REPORT_FILE, About, write_report
from lightning_3d.runs.report.sweep import SWEEP_REPORT_FILE, write_sweep_report

__all__ = ["REPORT_FILE", "SWEEP_REPORT_FILE", "About", "write_report", "write_sweep_report"]
