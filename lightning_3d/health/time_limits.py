"""How long a rank may take for what it does, before it counts as hung. Imports no torch."""

from __future__ import annotations

from lightning_3d.options.reliability import AUTO
from lightning_3d.ranks.heartbeat import SAVING, STARTING, STEP, Heartbeat

LEAST_SECONDS = 60.0
STEPS = 10.0
"""Times the median step that a part of a step may take."""

LONGER, STARTING_LONGER = 10.0, 60.0
"""Times as long for what is no training step, and for the first steps, in which kernels are
compiled and connections are made; and for the start, in which weights are read."""


def seconds_allowed(heartbeat: Heartbeat, hang_timeout: float | str, save_seconds: float) -> float:
    """Return how long the current action may take.

    Args:
        hang_timeout: seconds for a part of a training step; "auto" takes `STEPS` times the median
            step, at least `LEAST_SECONDS`.
        save_seconds: time limit of a save, which is never shorter here.
    """
    step = heartbeat.step_seconds()
    limit = (
        max(LEAST_SECONDS, STEPS * (step or 0.0)) if hang_timeout == AUTO else float(hang_timeout)
    )
    if heartbeat.phase == STEP and step is not None:
        return limit
    if heartbeat.phase == STARTING:
        return STARTING_LONGER * limit
    return max(LONGER * limit, save_seconds if heartbeat.phase == SAVING else 0.0)
