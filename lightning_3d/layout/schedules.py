"""The seven pipeline schedules and their rules for stages and micro-batches. Pure arithmetic, no
torch.

Names are the class names of `torch.distributed.pipelining` without `Schedule`. In formulas, `pp` is
the number of pipeline ranks, `vp` the number of stages on each (model chunks) and `m` the number of
micro-batches of one optimizer step on one data-parallel replica. The rules are those that the torch
classes check (2.11 to 2.13); `tests/layout/test_schedules.py` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.errors import LayoutError, did_you_mean, listed


@dataclass(frozen=True)
class ScheduleInfo:
    """Properties and requirements of a schedule.

    Attributes:
        name: torch's class name without `Schedule`.
        v_shaped: rank r owns stages r and 2 pp - 1 - r, so that the first and the last stage are
            neighbours.
        looped: rank r owns stages r, r + pp, r + 2 pp, ...; any `vp`.
        split_backward: gradients of inputs and of weights are computed in separate actions.
        fills_stages: the order is defined only when there are at least as many micro-batches as
            stages.
        in_rounds: micro-batches run in equal rounds of at least `pp`.
    """

    name: str
    v_shaped: bool = False
    looped: bool = False
    split_backward: bool = False
    fills_stages: bool = False
    in_rounds: bool = False

    @property
    def default_vp(self) -> int:
        """Stages per rank when the user gives none and pp > 1."""
        return 2 if self.v_shaped or self.looped else 1

    def allows_vp(self, vp: int) -> bool:
        """Check whether `vp` stages per rank are possible, for pp > 1."""
        if self.v_shaped:
            return vp == 2
        return vp >= 1 if self.looped else vp == 1

    def min_micro_batches(self, pp: int, vp: int) -> int:
        """Return the fewest micro-batches that the schedule accepts."""
        return pp * vp if self.fills_stages else 1

    def divisor(self, pp: int, m: int) -> int:
        """Return the number that must divide `m` micro-batches: the number of rounds, max(1, m //
        pp), or 1."""
        return max(1, m // pp) if self.in_rounds else 1

    def accepts(self, pp: int, vp: int, m: int) -> bool:
        """Check whether `m` micro-batches work. Without a pipeline (pp * vp == 1) any number
        does."""
        if m < 1:
            return False
        if pp * vp == 1:
            return True
        return m >= self.min_micro_batches(pp, vp) and m % self.divisor(pp, m) == 0

    def nearest_micro_batches(self, pp: int, vp: int, m: int) -> tuple[int, ...]:
        """Return the next smaller and the next larger number of micro-batches that works, or only
        `m` when it works."""
        if self.accepts(pp, vp, m):
            return (m,)
        below = [n for n in range(m - 1, max(0, m - 4 * pp), -1) if self.accepts(pp, vp, n)][:1]
        above = next(
            n for n in range(max(m, 0) + 1, max(m, 0) + 4 * pp * vp + 2) if self.accepts(pp, vp, n)
        )
        return (*below, above)


SCHEDULES: dict[str, ScheduleInfo] = {
    info.name: info
    for info in (
        ScheduleInfo("GPipe"),
        ScheduleInfo("1F1B", fills_stages=True),
        ScheduleInfo("Interleaved1F1B", looped=True, in_rounds=True),
        ScheduleInfo("LoopedBFS", looped=True),
        ScheduleInfo("InterleavedZeroBubble", looped=True, split_backward=True, in_rounds=True),
        ScheduleInfo("ZBVZeroBubble", v_shaped=True, split_backward=True),
        ScheduleInfo("DualPipeV", v_shaped=True, split_backward=True, fills_stages=True),
    )
}
"""All schedules, keyed by name."""


def find_schedule(name: str) -> ScheduleInfo:
    """Find a schedule by its name, ignoring case.

    Raises:
        LayoutError: an unknown name, with the nearest known one.
    """
    word = str(name)
    known = SCHEDULES.get(word) or next(
        (info for info in SCHEDULES.values() if info.name.lower() == word.lower()), None
    )
    if known is not None:
        return known
    question = did_you_mean(word, SCHEDULES)
    raise LayoutError(
        f'There is no pipeline schedule "{name}".{question} The schedules are {listed(SCHEDULES)}.'
    )


def default_schedule(vp: int = 1) -> ScheduleInfo:
    """Return the default schedule: 1F1B, or its interleaved form for more than one stage per
    rank."""
    return SCHEDULES["1F1B" if vp == 1 else "Interleaved1F1B"]


def schedules_for(vp: int) -> str:
    """Names of the schedules that run `vp` stages per rank, as a phrase."""
    return listed((info.name for info in SCHEDULES.values() if info.allows_vp(vp)), last="or")


def stages_of_rank(pp_rank: int, pp: int, vp: int, v_shaped: bool) -> tuple[int, ...]:
    """Return the stages of a pipeline rank in ascending order: (r, 2 pp - 1 - r) for a V, else r, r
    + pp, r + 2 pp, ...

    A single pipeline rank owns all its stages in either case.
    """
    if not 0 <= pp_rank < pp:
        raise LayoutError(
            f"There is no pipeline rank {pp_rank}: the {pp} ranks are numbered 0 to {pp - 1}."
        )
    if v_shaped and vp == 2:
        return (pp_rank, 2 * pp - 1 - pp_rank)
    if v_shaped and pp > 1:
        raise LayoutError(
            f"A V-shaped schedule has 2 stages on each pipeline rank, not {vp}. Use vp=2."
        )
    return tuple(range(pp_rank, pp * vp, pp))


def rank_of_stage(stage: int, pp: int, vp: int, v_shaped: bool) -> int:
    """Return the pipeline rank that owns a stage. The inverse of `stages_of_rank`."""
    for pp_rank in range(pp):
        if stage in stages_of_rank(pp_rank, pp, vp, v_shaped):
            return pp_rank
    raise LayoutError(
        f"There is no stage {stage}: the {pp * vp} stages are numbered 0 to {pp * vp - 1}."
    )


def predicted_bubble(info: ScheduleInfo, pp: int, vp: int, m: int) -> float:
    """Predict the share of a step, 0 to 1, that a pipeline rank is idle, for equal stages and
    communication that takes no time.

    In units of one stage's forward pass, a backward pass takes 2, half of it for the gradients of
    weights. Filling and draining the pipeline costs 3 (pp - 1); with m < pp ranks also wait for 3
    (pp - m) before each further chunk. Schedules that split the backward compute weight gradients
    in both (arXiv 2401.10241). Equal to a simulation of the orders of all seven schedules.
    """
    if pp == 1:
        return 0.0
    short = max(0, pp - m)
    if info.v_shaped:
        idle = max(pp - 1, 2 * (2 * pp - 1 - m))
    elif info.split_backward:
        idle = pp - 1 + short + (vp - 1) * (short + max(0, pp - 2 * m))
    else:
        idle = 3 * (pp - 1) + 3 * (vp - 1) * short
    return idle / (3 * m * vp + idle)
