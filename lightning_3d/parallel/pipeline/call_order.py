"""Check of the order in which a stage's forward calls the modules of a plan, which refuses what a
pipeline would compute wrongly.

What runs before the blocks is on the first stage only, what runs after them on the last, and every
block on one. A module that is called at a different place than the plan's "pp" part says may not be
on the stage that calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.errors import PlanError

_ADVICE = "Use a layout with pp = 1."
_SENT = (
    "Only hidden states are sent, and what the plan's 'pp' part names as inputs of the blocks"
    " (docs/your_model.md)."
)


@dataclass(frozen=True)
class PlanOrder:
    """The order of execution that a plan gives.

    Attributes:
        model: class of the pipelined module.
        before: names of the modules before the blocks.
        after: names of the modules after the blocks.
        layers: name of the list of blocks.
        blocks: number of blocks, without those that run behind the model (`ParallelPlan.ahead`).
    """

    model: str
    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]
    blocks: int


class CallOrder:
    """The calls of one forward of one stage. Recomputation in the backward is not followed.

    Args:
        plan: what the order should be.
        look: whether to look for NaN in the inputs of blocks other than the received hidden states,
            because absent values are NaN. This synchronizes with the device, so only the first
            forwards do it.

    Attributes:
        entered: whether the model itself has been called, which then calls its parts.
    """

    def __init__(self, plan: PlanOrder, *, look: bool = False) -> None:
        self._plan = plan
        self._next = 0
        self._inside: int | None = None
        self._preceded: list[str] = []
        self._followed: list[str] = []
        self.looks = look
        self._clean = True
        self.entered = False

    # The order of calls

    def enter_block(self, index: int) -> None:
        """Check the call of block `index`, on any stage, before it runs."""
        if index == self._next and self.entered:
            self._next += 1
            return
        plan = self._plan
        if not self.entered:
            raise PlanError(
                f"The step calls parts of {plan.model} by themselves ('{plan.layers}.{index}'), and"
                f" not {plan.model}(...). With pp > 1 no rank has all of them. Call the model"
                f" itself. {_ADVICE}"
            )
        called = f"The forward of {plan.model} calls block '{plan.layers}.{index}'"
        if index < self._next:
            what = f"{called} after '{plan.layers}.{self._next - 1}'"
        else:
            what = (
                f"{called} but skips '{plan.layers}.{self._next}' (does it drop layers at random?)"
            )
        raise PlanError(
            f"{what}. A pipeline runs every block of '{plan.layers}' once, in order. {_ADVICE}"
        )

    @contextmanager
    def in_block(self, index: int) -> Iterator[None]:
        """Context in which block `index` runs."""
        self._inside = index
        try:
            yield
        finally:
            self._inside = None

    def call_before(self, name: str) -> None:
        """Check the call of a module that the plan names before the blocks."""
        if self._next == 0:
            self._preceded.append(name)
            return
        plan = self._plan
        self._refuse_within(name)
        rest = [other for other in plan.before if other != name]
        after = [*self._followed, name, *plan.after]
        self._refuse_order(
            f"'{name}' runs after the blocks, but the plan names it before them. Name it after"
            f" '{plan.layers}'",
            rest,
            after,
        )

    def call_after(self, name: str) -> None:
        """Check the call of a module that the plan names after the blocks."""
        plan = self._plan
        # some blocks may run behind the model
        if self._next >= plan.blocks and self._inside is None:
            self._followed.append(name)
            return
        self._refuse_within(name)
        rest = [other for other in plan.after if other != name]
        self._refuse_order(
            f"'{name}' runs before the blocks, but the plan names it after them. Name it before"
            f" '{plan.layers}'",
            [*self._preceded, name, *plan.before],
            rest,
        )

    def finish(self) -> None:
        """Check the calls of a forward when the model has returned, on the last stage."""
        plan = self._plan
        if self._next < plan.blocks:
            raise PlanError(
                f"{plan.model} returned without calling block '{plan.layers}.{self._next}' (of"
                f" {plan.blocks} blocks). A pipeline runs every block once in every step. {_ADVICE}"
            )

    def _refuse_within(self, name: str) -> None:
        plan = self._plan
        if self._inside is not None:
            where = f"inside the block '{plan.layers}.{self._inside}'"
        elif 0 < self._next < plan.blocks:
            where = (
                f"between the blocks '{plan.layers}.{self._next - 1}' and"
                f" '{plan.layers}.{self._next}'"
            )
        else:
            return
        raise PlanError(
            f"'{name}' of {plan.model} runs {where}, but its parameters are on only one pipeline"
            " stage. Modules of the plan's 'pp' part must run before or after all blocks."
            f" {_ADVICE}"
        )

    def _refuse_order(self, what: str, before: Iterable[str], after: Iterable[str]) -> None:
        names = ", ".join(dict.fromkeys([*before, self._plan.layers, *after]))
        raise PlanError(
            f"The plan's 'pp' part has the wrong order for {self._plan.model}: {what}. The right"
            f" order is: {names}."
        )

    # Absent values

    def receive(self, received: Tensor | None) -> None:
        """Called with the hidden states from the stage before; NaN that is already in them comes
        from training."""
        if self.looks:
            self._clean = not has_nan(received)

    def look_at_inputs(
        self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuse absent values in the inputs of a block of this stage."""
        self.look_at_hidden(hidden, f"'{self._plan.layers}.{index}'")
        if not self.looks or not self._clean:
            return
        named: list[tuple[str, Any]] = [(str(place), value) for place, value in enumerate(args, 1)]
        for name, value in [*named, *((f"'{key}'", value) for key, value in kwargs.items())]:
            if value is not hidden and has_nan(value):
                raise PlanError(
                    f"Block '{self._plan.layers}.{index}' of {self._plan.model} needs a value of an"
                    f" earlier stage (argument {name}) that is not on this stage. {_SENT} {_ADVICE}"
                )

    def look_at_hidden(self, hidden: Any, reader: str) -> None:
        """Refuse hidden states that became NaN between blocks."""
        if self.looks and self._clean and has_nan(hidden):
            raise PlanError(
                f"Outside its blocks, {self._plan.model} adds a value of an earlier pipeline stage"
                f" to the hidden states before {reader} reads them. That value is not on this"
                f" stage. {_SENT} {_ADVICE}"
            )

    def look_at_loss(self, loss: Any) -> None:
        """Refuse a loss that is NaN although what has arrived, and what the blocks of this stage
        return, is not."""
        if self.looks and self._clean and has_nan(loss):
            raise PlanError(
                "The loss of the first micro-batch is NaN, although what the last pipeline stage"
                " received and computed is not. Use a layout with pp = 1. If the loss is NaN"
                " there, too, the loss function makes it: a log or root of a negative number, 0 /"
                " 0, or rows without a target. If not, the step reads a value of an earlier stage,"
                f" which is NaN here: what a block of {self._plan.model} returned, a parameter, or"
                f" what attributes have kept of them. {_SENT}"
            )

    def leave_block(self, hidden: Any) -> None:
        """Note whether a block of this stage returned NaN."""
        if self.looks and self._clean:
            self._clean = not has_nan(hidden)


def has_nan(value: Any) -> bool:
    """True if plain tensors in nested tuples, lists and dicts hold NaN. Others (fake ones,
    subclasses) are not checked."""
    if isinstance(value, (tuple, list)):
        return any(has_nan(item) for item in value)
    if isinstance(value, dict):
        return any(has_nan(item) for item in value.values())
    if type(value) not in (Tensor, nn.Parameter) or value.is_meta or not value.is_floating_point():
        return False
    return bool(torch.isnan(value.detach()).any())
