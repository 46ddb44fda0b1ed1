"""Callbacks for any Trainer. `MetricsCSV`, `ProgressBar` and `Summary` stand under these names in the configurations of saved runs."""

from lightning_3d.training.callbacks.metrics_csv import MetricsCSV
from lightning_3d.training.callbacks.progress_bar import ProgressBar
from lightning_3d.training.callbacks.summary import Summary

__all__ = ["MetricsCSV", "ProgressBar", "Summary"]
