"""Tensor x pipeline x data x context x expert parallel training as a PyTorch Lightning Strategy.

    Trainer(strategy=Lightning3DStrategy("tp2_pp2_dp2", micro_batch_size=2), ...)

Names are loaded when they are first used (PEP 562): importing this package imports neither torch
nor Lightning, so the planner and the checks of a configuration start without delay.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_3d.compat.log_lines import drop_lines
from lightning_3d.ranks.role import expect_hand_over
from lightning_3d.version import __version__

if TYPE_CHECKING:
    from lightning_3d.app.evaluation.callback import Evaluation
    from lightning_3d.app.planner.api import planned
    from lightning_3d.app.training.callbacks.metrics_csv import MetricsCSV
    from lightning_3d.app.training.callbacks.periodic_checkpoint import PeriodicCheckpoint
    from lightning_3d.app.training.callbacks.progress_bar import ProgressBar
    from lightning_3d.app.training.callbacks.summary import Summary
    from lightning_3d.app.training.router_log import RouterLog
    from lightning_3d.app.training.timeline import RunReport, Timeline
    from lightning_3d.app.verification.compare import verify
    from lightning_3d.engine.engine import Engine
    from lightning_3d.layout.elastic import fitting_layout
    from lightning_3d.layout.layout import Layout
    from lightning_3d.models.parallel_plan import Cut
    from lightning_3d.strategy.exponential_average import ExponentialAverage
    from lightning_3d.strategy.strategy import Lightning3DStrategy
    from lightning_3d.weights.initialize import initialize
    from lightning_3d.weights.pretrained import load_pretrained

drop_lines()  # here, before scripts and ranks import the libraries that print them
expect_hand_over()

__all__ = [
    "Cut",
    "Engine",
    "Evaluation",
    "ExponentialAverage",
    "Layout",
    "Lightning3DStrategy",
    "MetricsCSV",
    "PeriodicCheckpoint",
    "ProgressBar",
    "RouterLog",
    "RunReport",
    "Summary",
    "Timeline",
    "__version__",
    "fitting_layout",
    "initialize",
    "load_pretrained",
    "planned",
    "verify",
]

_HOMES = {
    "Cut": "lightning_3d.models.parallel_plan",
    "Engine": "lightning_3d.engine.engine",
    "Evaluation": "lightning_3d.app.evaluation.callback",
    "ExponentialAverage": "lightning_3d.strategy.exponential_average",
    "Layout": "lightning_3d.layout",
    "Lightning3DStrategy": "lightning_3d.strategy",
    "MetricsCSV": "lightning_3d.app.training.callbacks.metrics_csv",
    "PeriodicCheckpoint": "lightning_3d.app.training.callbacks.periodic_checkpoint",
    "ProgressBar": "lightning_3d.app.training.callbacks.progress_bar",
    "RouterLog": "lightning_3d.app.training.router_log",
    "RunReport": "lightning_3d.app.training.timeline",
    "Summary": "lightning_3d.app.training.callbacks.summary",
    "Timeline": "lightning_3d.app.training.timeline",
    "fitting_layout": "lightning_3d.layout.elastic",
    "initialize": "lightning_3d.weights.initialize",
    "load_pretrained": "lightning_3d.weights.pretrained",
    "planned": "lightning_3d.app.planner.api",
    "verify": "lightning_3d.app.verification.compare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
