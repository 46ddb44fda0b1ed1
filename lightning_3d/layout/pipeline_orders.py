"""The order of actions of every pipeline rank for the seven schedules of
`torch.distributed.pipelining`, in plain Python.

The engine runs these orders and the planner predicts their time and memory. An action is (stage,
kind, micro-batch). Kinds are those of the zero-bubble paper (arXiv:2401.10241) and of torch: F
forward, B backward, I gradients of inputs, W gradients of weights.
`tests/layout/test_planner_orders.py` compares them with the orders that torch's classes compute.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import count as counting

from lightning_3d.layout.schedules import find_schedule, stages_of_rank

Action = tuple[int, str, int]
Order = tuple[tuple[Action, ...], ...]


@lru_cache(maxsize=256)
def training_order(schedule: str, pp: int, vp: int, micro_batches: int) -> Order:
    """Actions of every pipeline rank, in its order, for one optimizer step.

    Args:
        schedule: name as in `lightning_3d.layout.schedules`.
        pp: pipeline ranks.
        vp: stages per rank.
        micro_batches: number of micro-batches of the step.
    """
    return tuple(_order_of_rank(schedule, rank, pp, vp, micro_batches) for rank in range(pp))


def _order_of_rank(
    schedule: str, rank: int, pp: int, vp: int, micro_batches: int
) -> tuple[Action, ...]:
    info = find_schedule(schedule)
    if pp * vp == 1:
        return _alternating(0, 0, micro_batches)
    if info.name == "GPipe":
        return _alternating(rank, micro_batches, micro_batches)
    if info.name == "1F1B":
        return _alternating(rank, pp - 1 - rank, micro_batches)
    if info.name == "LoopedBFS":
        return _breadth_first(stages_of_rank(rank, pp, vp, False), micro_batches)
    if info.name == "ZBVZeroBubble":
        return _zero_bubble_v(rank, pp, micro_batches)
    if info.name == "DualPipeV":
        return _dual_pipe_v(rank, pp, micro_batches)
    return _interleaved(rank, pp, vp, micro_batches, info.split_backward)


@lru_cache(maxsize=1024)
def first_forwards(schedule: str, pp: int, vp: int, micro_batches: int) -> int:
    """Return the number of forward passes of stages that the first rank runs before its first
    backward pass. Arguments are those of `training_order`."""
    actions = _order_of_rank(schedule, 0, pp, vp, micro_batches)
    return next(place for place, (_, kind, _) in enumerate(actions) if kind != "F")


@lru_cache(maxsize=64)
def forward_order(schedule: str, pp: int, vp: int, micro_batches: int) -> Order:
    """Actions of every pipeline rank for a pass without backward: all micro-batches of its first
    stage, then of its next."""
    v_shaped = find_schedule(schedule).v_shaped and pp > 1
    stages = [sorted(stages_of_rank(rank, pp, vp, v_shaped)) for rank in range(pp)]
    return tuple(
        tuple((stage, "F", i) for stage in own for i in range(micro_batches)) for own in stages
    )


def _alternating(stage: int, warm_up: int, count: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then forward and backward in turn, then the remaining backwards
    (PipeDream, arXiv:1806.03377)."""
    forward = [(stage, "F", i) for i in range(count)]
    backward = [(stage, "B", i) for i in range(count)]
    return _in_turn(forward, [[action] for action in backward], min(warm_up, count))


def _in_turn(
    forward: list[Action], backward: list[list[Action]], warm_up: int
) -> tuple[Action, ...]:
    """`warm_up` forwards, then one forward and one entry of `backward` in turn, then the rest of
    `backward`."""
    order = forward[:warm_up]
    for index, actions in enumerate(backward):
        order += forward[warm_up + index : warm_up + index + 1]
        order += actions
    return tuple(order)


def _breadth_first(stages: tuple[int, ...], count: int) -> tuple[Action, ...]:
    """All micro-batches of the first stage, then of the next; backwards in the opposite order
    (arXiv:2211.05953)."""
    forward = [(stage, "F", i) for stage in stages for i in range(count)]
    return tuple(forward + [(stage, "B", i) for stage, _, i in reversed(forward)])


def _interleaved(rank: int, pp: int, vp: int, count: int, split: bool) -> tuple[Action, ...]:
    """Rounds of micro-batches pass a rank's stages one after the other (arXiv:2104.04473, section
    2.2). With `split`, gradients of weights follow those of inputs `rank` actions later (the
    schedule ZB-H1 of arXiv:2401.10241)."""
    in_round = count // max(1, count // pp)
    chunks = [(step // in_round) % vp for step in range(count * vp)]
    forward = _numbered([chunk * pp + rank for chunk in chunks], "F")
    backward = _numbered([(vp - 1 - chunk) * pp + rank for chunk in chunks], "I" if split else "B")
    warm_up = min((vp - 1) * in_round + (1 if split else 2) * (pp - 1 - rank), count * vp)
    if not split:
        return _in_turn(forward, [[action] for action in backward], warm_up)
    weights = [(stage, "W", i) for stage, _, i in backward]
    late = [
        [action] if step < rank else [action, weights[step - rank]]
        for step, action in enumerate(backward)
    ]
    return _in_turn(forward, late, warm_up) + tuple(weights[max(0, len(weights) - rank) :])


def _numbered(stages: list[int], kind: str) -> list[Action]:
    """One action for each stage of the list; a stage's micro-batches are numbered in the order of
    the list."""
    seen: dict[int, Iterator[int]] = defaultdict(counting)
    return [(stage, kind, next(seen[stage])) for stage in stages]


class _CountedOrder:
    """An order under construction: each kind of action of a stage takes its next micro-batch."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: dict[tuple[int, str], int] = {}
        self._pending: deque[tuple[int, int]] = deque()

    def add(self, stage: int, *kinds: str) -> None:
        """Append F, B, I or W of a stage. B counts as I and W."""
        for kind in kinds:
            index = self._count(stage, "I" if kind == "B" else kind)
            if kind == "B":
                self._count(stage, "W")
            self.actions.append((stage, kind, index))
            if kind == "I":
                self._pending.append((stage, index))

    def add_pending(self) -> None:
        """Append W of the oldest I that has none yet, if there is one."""
        if self._pending:
            stage, index = self._pending.popleft()
            self._count(stage, "W")
            self.actions.append((stage, "W", index))

    def count(self, stage: int, kind: str) -> int:
        """Number of actions of a kind so far."""
        return self._next.get((stage, kind), 0)

    def _count(self, stage: int, kind: str) -> int:
        index = self.count(stage, kind)
        self._next[stage, kind] = index + 1
        return index


def _zero_bubble_v(rank: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    """ZB-V of arXiv:2401.10241, section 6. Computed for at least 2 pp - 1 micro-batches; those that
    do not exist are removed."""
    down, up = rank, 2 * pp - 1 - rank
    count = max(2 * pp - 1, micro_batches)
    order = _CountedOrder()
    order.add(down, *"F" * (2 * (pp - rank) - 1))
    for _ in range(rank):
        order.add(up, "F")
        order.add(down, "F")
    for _ in range(pp - rank):
        order.add(up, "F", "I", "W")
    while order.count(up, "F") < order.count(down, "F") or order.count(down, "F") < count:
        if order.count(down, "F") < count:
            order.add(down, "F")
        order.add(down, "I", "W")
        order.add(up, "F", "I", "W")
    for _ in range(rank):
        order.add(down, "I")
        order.add(up, "I")
    for _ in range(pp - rank):
        order.add(down, "I", "W")
    for stage in (up, down):
        order.add(stage, *"W" * (order.count(stage, "I") - order.count(stage, "W")))
    return tuple(action for action in order.actions if action[2] < micro_batches)


def _dual_pipe_v(rank: int, pp: int, count: int) -> tuple[Action, ...]:
    """One half of DualPipe (arXiv:2412.19437, section 3.2.1), in the shape of a V."""
    down, up, rest = rank, 2 * pp - 1 - rank, pp - rank - 1
    order = _CountedOrder()
    order.add(down, *"F" * (2 * rest))
    for _ in range(rank + 1):
        order.add(down, "F")
        order.add(up, "F")
    for _ in range(rest):
        order.add(up, "I")
        order.add_pending()
        order.add(up, "F")
    for _ in range(count - 2 * pp + rank + 1):
        order.add(down, "F")
        order.add(up, "B")
        order.add(up, "F")
        order.add(down, "B")
    for _ in range(rest):
        order.add(up, "B")
        order.add(up, "F")
        order.add(down, "B")
    # of the 2 (rank + 1) backwards, those from here on are split
    split = 2 * ((rank + 1) // 2) + (1 - rank % 2)
    for index in range(2 * (rank + 1)):
        order.add(up if index % 2 == 0 else down, "I" if index >= split else "B")
    for _ in range(rest):
        order.add_pending()
        order.add(down, "I")
    for _ in range(rank + 1):
        order.add_pending()
    return tuple(order.actions)
