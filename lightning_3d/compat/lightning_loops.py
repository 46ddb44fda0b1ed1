"""The state of Lightning's loops in a checkpoint that a Trainer has not written."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any


def loops_after(steps: int) -> dict[str, Any]:
    """Return what makes a Trainer that resumes go on after so many optimizer steps, at the
    beginning of its first epoch.

    The names are those of the attributes of `FitLoop` and the loops in it (Lightning 2.6,
    `_Loop.state_dict`; not public). What is left out keeps its initial value. Each loop asks for a
    "state_dict" of its own.
    """
    done = {"ready": steps, "completed": steps}
    zeroed = done | {"started": steps}
    optimizer = {
        "step": {"total": done, "current": done},
        "zero_grad": {"total": zeroed, "current": zeroed},
    }
    parts = ("automatic_optimization.", "manual_optimization.", "val_loop.")
    fit_loop: dict[str, Any] = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
    }
    fit_loop |= {f"epoch_loop.{part}state_dict": {} for part in parts}
    fit_loop["epoch_loop.automatic_optimization.optim_progress"] = {"optimizer": optimizer}
    return {"fit_loop": fit_loop}


def lightning_version() -> str:
    """Return the version of Lightning, by which a Trainer decides how to read a checkpoint. Does
    not import it."""
    return version("lightning")
