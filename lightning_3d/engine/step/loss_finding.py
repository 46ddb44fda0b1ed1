"""What the proof of the loss has found, and how it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from torch import Tensor

from lightning_3d.errors import listed, plural
from lightning_3d.layout.layout import Layout

Logged = dict[str, tuple[str, Tensor, Tensor]]
"""Of each number that a step has logged: how it is combined, its value and its weight."""


@dataclass(frozen=True)
class Number:
    """A loss and its weight, in rows or target tokens."""

    loss: float
    weight: float

    @staticmethod
    def of(sums: Tensor, cp: int) -> Number:
        total, weight = sums.tolist()
        return Number(total / weight if weight > 0 else 0.0, weight * cp)


@dataclass(frozen=True)
class Finding:
    """The loss of some rows, and the losses of parts of them, on the rank that computed them.

    Attributes:
        rows: rows of each part.
        tolerance: relative difference that rounding may make.
        unpaired: whether parts may have drawn other random numbers than the whole.
        floor: largest loss so far. Rounding of a small loss may be that of larger numbers.
        logged: names of logged numbers that are not what parts of the rows combine to, with that of
            the whole and the combined one.
    """

    whole: Number
    parts: tuple[Number, ...]
    rows: tuple[int, ...]
    tolerance: float
    unpaired: bool = False
    floor: float = 0.0
    logged: tuple[tuple[str, float, float], ...] = ()

    @property
    def mean(self) -> float:
        """Weighted mean of the parts."""
        weight = sum(part.weight for part in self.parts)
        return (
            sum(part.loss * part.weight for part in self.parts) / weight
            if weight > 0
            else self.whole.loss
        )

    @property
    def scale(self) -> float:
        """Largest loss."""
        return max(
            [
                self.floor,
                *(abs(one.loss) for one in (self.whole, *self.parts) if isfinite(one.loss)),
            ]
        )

    @property
    def difference(self) -> float:
        """Difference between the whole and the mean."""
        return abs(self.whole.loss - self.mean) if isfinite(self.mean) else inf

    @property
    def differs(self) -> bool:
        """Whether the loss is not a mean. A variance over one row is not finite, for example, or a
        mean over rows without any label."""
        if not isfinite(self.whole.loss):
            return False  # the guard of losses that are not finite has a better message
        return self.differ(self.whole.loss, self.mean)

    def differ(self, one: float, other: float) -> bool:
        """Return whether two losses differ by more than rounding may make."""
        if isfinite(one) and isfinite(other):
            return abs(one - other) > self.tolerance * (self.scale + min(1e-2, self.tolerance))
        return isfinite(one) != isfinite(other)

    @property
    def tells(self) -> bool:
        """Whether the losses are not all one number, as those of rows that have no partners among
        so few."""
        return any(part.loss != self.whole.loss for part in self.parts)

    @property
    def is_sum(self) -> bool:
        """Whether the whole is the sum of its parts."""
        total = sum(part.loss for part in self.parts)
        return abs(self.whole.loss - total) <= self.tolerance * max(
            abs(self.whole.loss), abs(total)
        )


def differing_logs(
    whole: Logged, parts: Sequence[Logged], tolerance: float
) -> tuple[tuple[str, float, float], ...]:
    """Compare what was logged for some rows with what parts of them combine to."""
    found = []
    for name, (combine, value, _) in whole.items():
        values = [part[name] for part in parts if name in part]
        if combine not in ("mean", "sum") or len(values) < len(parts):
            continue
        weight = sum(float(each) for _, _, each in values)
        total = sum(
            float(number) * (1.0 if combine == "sum" else float(each)) for _, number, each in values
        )
        combined = total if combine == "sum" or weight <= 0 else total / weight
        largest = max(
            abs(float(number)) for number in (value, *(number for _, number, _ in values))
        )
        if (
            isfinite(combined)
            and isfinite(largest)
            and abs(float(value) - combined) > tolerance * (largest + min(1e-2, tolerance))
        ):
            found.append((name, float(value), combined))
    return tuple(found)


def about_logs(
    found: Sequence[tuple[str, float, float]], layout: Layout, micro_batches: int, rows: int
) -> str:
    """Describe logged numbers that are not as on one process. Training is not affected."""
    numbers = listed(
        [
            f"'{name}' ({whole:.4g} for some rows, {combined:.4g} as the mean of parts)"
            for name, whole, combined in found
        ]
    )
    return (
        f"The step logs numbers that are not means over rows: {numbers}."
        f" {described(layout.dp, micro_batches, rows)}, of which the mean is logged, so these are"
        " others than on one process. The weights are not affected. Log what is a mean (a mean"
        " square in place of its root, a loss in place of its exponential), or a torchmetrics"
        " object."
    )


def at_once(layout: Layout, rows: int) -> str:
    """Say what computes a global batch at once."""
    axes = [f"{axis} = 1" for axis in ("pp", "dp") if getattr(layout, axis) > 1]
    return (
        f"a layout with {listed(axes)} and micro_batch_size={rows}"
        if axes
        else f"micro_batch_size={rows}"
    )


def refusal(found: Finding, layout: Layout, micro_batches: int, rows: int) -> str:
    """Explain why a loss is not trained as one process trains it, and what works.

    Args:
        micro_batches: of each data-parallel rank.
        rows: of a micro-batch.
    """
    dp = layout.dp
    wholes = plural(sum(found.rows), "row")
    losses = listed(
        [
            f"{part.loss:.6g} for {plural(size, 'row')}"
            for part, size in zip(found.parts, found.rows, strict=True)
        ]
    )
    looks = (
        "It looks like a sum over rows."
        if found.is_sum
        else (
            "It looks like a loss that compares the rows of a batch, or divides by something else"
            " than their number: contrastive pairs, class weights, rows without a label, mixup, a"
            " variance or a root of a mean, batch statistics (BatchNorm)."
        )
    )
    declare = (
        'Pass loss_reduction="sum" to the strategy'
        if found.is_sum
        else (
            'Let training_step return {"loss": loss, "loss_weight": n}, where n is what the loss is'
            " divided by (labels, sum of class weights), if there is such a number. Or pass"
            ' loss_reduction="accumulate" to train the mean over micro-batches, as gradient'
            " accumulation does, and DDP over its ranks"
        )
    )
    whole = at_once(layout, dp * micro_batches * rows)
    return (
        f"The loss of training_step is not a mean over rows: it is {found.whole.loss:.6g} for"
        f" {wholes} together, but {losses}, whose weighted mean is {found.mean:.6g}."
        f" {described(dp, micro_batches, rows)}, so this would train another loss than one process."
        f" {looks} {declare}. Or use {whole}, which computes the global batch at once. See"
        " docs/your_model.md."
    )


def described(dp: int, micro_batches: int, rows: int) -> str:
    """Describe how a global batch is split."""
    return (
        f"The global batch of {plural(dp * micro_batches * rows, 'row')} is split into"
        f" {_parts(dp, micro_batches, rows)}"
    )


def summary(dp: int, micro_batches: int, rows: int, accumulated: int = 1) -> str:
    """Summarize how a global batch is split, for the start of a fit."""
    batches = f"{accumulated} batches x " if accumulated > 1 else ""
    total = plural(accumulated * dp * micro_batches * rows, "row")
    return f"global batch {total}: {batches}{_parts(dp, micro_batches, rows)}"


def _parts(dp: int, micro_batches: int, rows: int) -> str:
    ranks = f"{plural(dp, 'data-parallel rank')} x " if dp > 1 else ""
    split = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    return f"{ranks}{split} of {plural(rows, 'row')}"
