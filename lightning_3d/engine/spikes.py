"""Reactions to a loss that jumps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.engine.first_nonfinite import can_repeat
from lightning_3d.engine.step.again import RankOfModel
from lightning_3d.options.reliability import RERUN, SKIP

if TYPE_CHECKING:
    from lightning_3d.engine.nonfinite import StepGuard
    from lightning_3d.engine.step import StepResult


def judge_spike(built: RankOfModel, guard: StepGuard, step: StepResult) -> None:
    """Report a loss that jumps; skip the optimizer step, or compute the step again, if the guard is
    to. Call it before the optimizer steps.

    The loss is the same on all ranks, so that all take the same branches.

    Args:
        step: numbers of the step; a second run that differs replaces them.
    """
    spike = guard.find_spike()
    if spike is None:
        return
    words = f"Step {built.loop.steps + 1}: {spike.words}."
    if guard.on_spike == SKIP:
        step.skipped = True
        words += " The optimizer skips this step."
    elif guard.on_spike == RERUN:
        words += _run_again(built, step)
    rank_zero_warn(words)


def _run_again(built: RankOfModel, step: StepResult) -> str:
    """Compute the step again, and keep the second result. Returns a sentence about it. Collective
    over the world."""
    if not can_repeat(built):
        return " It cannot be computed again, because the step changes its batch."
    first, computed = step.loss, built.repeatable.again()
    step.loss, step.grad_norm = computed.totals.mean_loss, built.backend.grad_norm()
    if step.loss == first:
        return " Computed again, it is the same to the last bit: look at the data of this step."
    return (
        f" Computed again from the same numbers, it is {step.loss:.9g}: the arithmetic was wrong"
        " the first time. The second result is used. Look for a device that computes wrongly"
        " (lightning-3d selftest, trainer.rerun_every_n_steps)."
    )
