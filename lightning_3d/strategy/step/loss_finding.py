"""What the proof of the loss has found, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from torch import Tensor

from lightning_3d.errors import listed, plural
from lightning_3d.layout.layout import Layout


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
    """

    whole: Number
    parts: tuple[Number, ...]
    rows: tuple[int, ...]
    tolerance: float
    unpaired: bool = False

    @property
    def mean(self) -> float:
        """Weighted mean of the parts."""
        weight = sum(part.weight for part in self.parts)
        return sum(part.loss * part.weight for part in self.parts) / weight if weight > 0 else self.whole.loss

    @property
    def scale(self) -> float:
        """Largest loss."""
        return max((abs(one.loss) for one in (self.whole, *self.parts) if isfinite(one.loss)), default=0.0)

    @property
    def difference(self) -> float:
        """Difference between the whole and the mean."""
        return abs(self.whole.loss - self.mean) if isfinite(self.mean) else inf

    @property
    def differs(self) -> bool:
        """Whether the loss is not a mean. A variance over one row is not finite, for example, or a mean over rows without any label."""
        if not isfinite(self.whole.loss):
            return False  # the guard of losses that are not finite has a better message
        return self.differ(self.whole.loss, self.mean)

    def differ(self, one: float, other: float) -> bool:
        """Return whether two losses differ by more than rounding may make."""
        if isfinite(one) and isfinite(other):
            return abs(one - other) > self.tolerance * (self.scale + min(1e-2, self.tolerance))
        return isfinite(one) != isfinite(other)

    @property
    def is_sum(self) -> bool:
        """Whether the whole is the sum of its parts."""
        total = sum(part.loss for part in self.parts)
        return abs(self.whole.loss - total) <= self.tolerance * max(abs(self.whole.loss), abs(total))


def at_once(layout: Layout, rows: int) -> str:
    """Say what computes a global batch at once."""
    axes = [f"{axis} = 1" for axis in ("pp", "dp") if getattr(layout, axis) > 1]
    return f"a layout with {listed(axes)} and micro_batch_size={rows}" if axes else f"micro_batch_size={rows}"


def refusal(found: Finding, layout: Layout, micro_batches: int, rows: int) -> str:
    """Explain why a loss is not trained as one process trains it, and what works.

    Args:
        micro_batches: of each data-parallel rank.
        rows: of a micro-batch.
    """
    dp = layout.dp
    wholes = plural(sum(found.rows), "row")
    losses = listed([f"{part.loss:.6g} for {plural(size, 'row')}" for part, size in zip(found.parts, found.rows, strict=True)])
    looks = (
        "It looks like a sum over rows."
        if found.is_sum
        else "It looks like a loss that compares the rows of a batch, or divides by something else than their number: contrastive pairs,"
        " class weights, rows without a label, mixup, a variance or a root of a mean, batch statistics (BatchNorm)."
    )
    declare = (
        'Pass loss_reduction="sum" to the strategy'
        if found.is_sum
        else 'Let training_step return {"loss": loss, "loss_weight": n}, where n is what the loss is divided by (labels, sum of class'
        ' weights), if there is such a number. Or pass loss_reduction="accumulate" to train the mean over micro-batches, as gradient'
        " accumulation does, and DDP over its ranks"
    )
    whole = at_once(layout, dp * micro_batches * rows)
    return (
        f"The loss of training_step is not a mean over rows: it is {found.whole.loss:.6g} for {wholes} together, but {losses}, whose"
        f" weighted mean is {found.mean:.6g}. {described(dp, micro_batches, rows)}, so this would train another loss than one process."
        f" {looks} {declare}. Or use {whole}, which computes the global batch at once. See docs/your_model.md."
    )


def described(dp: int, micro_batches: int, rows: int) -> str:
    """Describe how a global batch is split."""
    return f"The global batch of {plural(dp * micro_batches * rows, 'row')} is split into {_parts(dp, micro_batches, rows)}"


def summary(dp: int, micro_batches: int, rows: int, accumulated: int = 1) -> str:
    """Summarize how a global batch is split, for the start of a fit."""
    batches = f"{accumulated} batches x " if accumulated > 1 else ""
    total = plural(accumulated * dp * micro_batches * rows, "row")
    return f"global batch {total}: {batches}{_parts(dp, micro_batches, rows)}"


def _parts(dp: int, micro_batches: int, rows: int) -> str:
    ranks = f"{plural(dp, 'data-parallel rank')} x " if dp > 1 else ""
    split = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    return f"{ranks}{split} of {plural(rows, 'row')}"
