"""Callbacks for any Trainer. The configurations of saved runs name `MetricsCSV`, `ProgressBar` and
`Summary` in this package."""

from lightning_3d.app.training.callbacks.metrics_csv import MetricsCSV
from lightning_3d.app.training.callbacks.progress_bar import ProgressBar
from lightning_3d.app.training.callbacks.summary import Summary

__all__ = ["MetricsCSV", "ProgressBar", "Summary"]
