"""The weight of an optimizer step, by which its losses are divided before their backward.

So gradients have the size that they have on one process while the backward runs: hooks and
functions of the user's that clamp or normalize them get the same numbers. What remains to be
divided by, because nobody knew it before, is known when the gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.engine.step.loss_weights import LossWeights, TokenMeanLoss
from lightning_3d.engine.step.micro_batches import MicroBatches
from lightning_3d.engine.step.totals import BatchTotals
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.mesh import Mesh


class LossScale:
    """Divides the losses of an optimizer step by a weight that is the same on all ranks.

    In the first step of a fit, and where the user's code sees gradients in the backward, it is the
    weight of the step: ranks add up those of their batches, by one all-reduce of a number. Else it
    is a power of two near the weight of the step before, which rounds nothing: what a step computes
    must not depend on the one before.

    Of batches that accumulate, each has the same weight, as in Lightning, which divides their
    losses by `accumulate_grad_batches` whatever their rows, also where an epoch ends before a step
    has so many. Weights that only show when the step runs (target tokens, those that the step
    returns) stay as they are, so that the loss of a step is a mean over its tokens.

    Args:
        mesh: process groups.
        weights: weights of the micro-batches.
        device: device of this rank.

    Attributes:
        inverse: what losses are multiplied by, float64, shape ().
        correction: what gradients are multiplied by to have the size that they have on one process,
            float64, shape ().
        equalizer: what a weight that was known before is multiplied by, so that each batch of the
            step weighs the same.
        sees: whether code of the user's sees gradients while a backward runs, on this rank.
        changes: whether hooks of the user's have changed gradients, on this rank.
        short_steps_weigh_less: whether a step that has fewer batches than were announced weighs as
            many as were, as in Lightning.
    """

    def __init__(self, mesh: Mesh, weights: LossWeights, device: torch.device) -> None:
        self._mesh, self._weights, self._device = mesh, weights, device
        self._warned = False
        self.short_steps_weigh_less = True
        self.begin_fit()

    def begin_fit(self) -> None:
        """Begin a fit, whose batches may have other sizes."""
        self.inverse = self.correction = self.equalizer = self._number(1)
        self.sees = self.changes = self._seen_anywhere = False
        self._earlier: Tensor | None = None
        self._batches, self._first = 1, self._number(1)
        self._seen_weights: list[tuple[float, float]] = []

    def begin_step(self, micro_batches: MicroBatches, batches: int, *, first: bool) -> None:
        """Begin an optimizer step.

        Args:
            micro_batches: of its first batch.
            batches: number of batches that accumulate for a step.
            first: whether it is the first step of a training, which no checkpoint precedes.
        """
        self._batches, self.equalizer = batches, self._number(1)
        earlier, self.correction = self._earlier, self._number(1)
        if earlier is not None and not self._seen_anywhere:
            self.inverse = _power_of_two(earlier)
            return
        total = (
            self._number(batches) if self._weights.sums else self._expected(micro_batches) * batches
        )
        if self._mesh.size("dp") > 1 and not self._weights.sums:
            dist.all_reduce(total, group=self._mesh.group("dp"))
        exact = torch.where(total > 0, 1.0 / total, 1.0)
        self.inverse = exact if first or self._seen_anywhere else _power_of_two(total)
        self.correction = exact / self.inverse

    def begin_batch(self, micro_batches: MicroBatches, *, begins: bool) -> None:
        """Begin a batch of a step, the first one if it `begins` the step. Ranks add up its weight
        where several batches accumulate."""
        if self._batches == 1 or self._weights.sums:
            return
        weight = self._number(self._known(micro_batches))
        if self._mesh.size("dp") > 1:
            dist.all_reduce(weight, group=self._mesh.group("dp"))
        if begins:
            self._first = weight
        self.equalizer = self._first / weight

    def end_step(self, weight: Tensor, scaled: Tensor, batches: int) -> Tensor:
        """Return what the gradients of a step are multiplied by, shape ().

        Args:
            weight: of the step over all ranks, on the device.
            scaled: the same as the backward had it.
            batches: number of its batches.
        """
        self._earlier = weight
        return torch.where(scaled > 0, self._share(batches) / scaled, 0.0)

    def _share(self, batches: int) -> float:
        """What a step of so many batches weighs, compared with one of as many as were announced."""
        return batches / self._batches if self.short_steps_weigh_less else 1.0

    def _expected(self, micro_batches: MicroBatches) -> Tensor:
        """Weight of a batch of this rank, as far as it shows before the step has run."""
        real = len(micro_batches) - micro_batches.fillers
        labels = [_labels_of(batch) for batch in micro_batches.batches[:real]]
        if self._weights.counts_targets and all(
            any(value is not None for value in found) for found in labels
        ):
            counts = [TokenMeanLoss.count_targets(*found) for found in labels]
            return (
                torch.stack(counts).sum().to(self._device, torch.float64)
                if counts
                else self._number(0)
            )
        return self._number(self._known(micro_batches))

    def _known(self, micro_batches: MicroBatches) -> int:
        """Weight of a batch of this rank, where neither tokens nor the step decide about it."""
        real = len(micro_batches) - micro_batches.fillers
        return real if self._weights.equal else micro_batches.rows * real

    def _number(self, value: float) -> Tensor:
        # torch.tensor would synchronize
        return torch.full((), value, dtype=torch.float64, device=self._device)

    def check(self, totals: BatchTotals, *, begins: bool, ends: bool) -> None:
        """Refuse hooks that got gradients of another size than on one process; warn where one
        process weighs batches differently.

        Args:
            totals: of one batch.
            begins: whether it is the first batch of its step.
            ends: whether it is the last one.

        Raises:
            ConfigError: on all ranks.
        """
        if begins:
            self._seen_weights = []
        self._seen_weights.append((totals.scaled, totals.weight))
        self._seen_anywhere = self._seen_anywhere or totals.seeing > 0
        if not ends or self._weights.sums:
            return
        self._warn_of_unequal()
        if totals.changing == 0:
            return
        scaled = [scaled for scaled, _ in self._seen_weights]
        size = sum(scaled) * float(self.correction) / self._share(len(scaled))
        if size > 0 and abs(size - 1) > 1e-6:
            raise ConfigError(
                "A hook changes gradients while the backward runs (Tensor.register_hook or"
                " register_full_backward_hook), but the weight of the step was not known before:"
                f" the hook got gradients {size:.4g} times as large as on one process. Register the"
                " hook in each step, return a loss that is a mean over rows or that the model"
                ' computes from "labels" in the batch, and use accumulate_grad_batches=1. Or'
                " change gradients of parameters in on_before_optimizer_step."
            )

    def _warn_of_unequal(self) -> None:
        """Warn once if batches of a step do not weigh the same."""
        (least, few), (most, many) = min(self._seen_weights), max(self._seen_weights)
        if self._warned or most - least <= 1e-6 * most:
            return
        self._warned = True
        rank_zero_warn(
            f"Batches of one optimizer step (accumulate_grad_batches) have {few:g}"
            f" and {many:g} target tokens (or weights that training_step returns). The loss of the"
            " step is the mean over all of them, but plain Lightning averages the mean losses of"
            " the batches. To train the same on one process, use accumulate_grad_batches=1 and"
            " larger batches: they are split into micro-batches anyway."
        )


def _power_of_two(weight: Tensor) -> Tensor:
    return torch.where(weight > 0, torch.exp2(-weight.clamp(min=1e-30).log2().round()), 1.0)


def _labels_of(batch: Any) -> tuple[Any, Any]:
    """Labels, and shifted labels, of a batch that is a mapping; None for what is not there."""
    found = batch if isinstance(batch, Mapping) else {}
    return found.get("labels"), found.get("shift_labels")
