"""The weight of an optimizer step, by which its losses are divided before their backward.

So gradients have the size that they have on one process while the backward runs: hooks and functions of the user's that clamp or normalize
them get the same numbers. What remains to be divided by, because nobody knew it before, is known when the gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.strategy.step.loss_weights import LossWeights, TokenMeanLoss
from lightning_3d.strategy.step.micro_batches import MicroBatches
from lightning_3d.strategy.step.totals import BatchTotals


class LossScale:
    """Divides the losses of an optimizer step by a weight that is the same on all ranks.

    In the first step of a fit, and where the user's code sees gradients in the backward, it is the weight of the step: ranks add up those
    of their batches, by one all-reduce of a number. Else it is a power of two near the weight of the step before, which rounds nothing:
    what a step computes must not depend on the one before.

    Args:
        mesh: process groups.
        weights: weights of the micro-batches.
        device: device of this rank.

    Attributes:
        inverse: what losses are multiplied by, float64, shape ().
        correction: what gradients are multiplied by to have the size that they have on one process, float64, shape ().
        sees: whether code of the user's sees gradients while a backward runs, on this rank.
        changes: whether hooks of the user's have changed gradients, on this rank.
    """

    def __init__(self, mesh: Mesh, weights: LossWeights, device: torch.device) -> None:
        self._mesh, self._weights, self._device = mesh, weights, device
        self.begin_fit()

    def begin_fit(self) -> None:
        """Begin a fit, whose batches may have other sizes."""
        self.inverse = self.correction = self._number(1)
        self.sees = self.changes = self._seen_anywhere = False
        self._earlier: Tensor | None = None
        self._weight = 0.0

    def begin_step(self, micro_batches: MicroBatches, batches: float, *, first: bool) -> None:
        """Begin an optimizer step.

        Args:
            micro_batches: of its first batch.
            batches: number of its batches.
            first: whether it is the first step of a training, which no checkpoint precedes.
        """
        earlier, self.correction = self._earlier, self._number(1)
        if earlier is not None and not self._seen_anywhere:
            self.inverse = _power_of_two(earlier)
            return
        total = self._number(batches) if self._weights.sums else self._expected(micro_batches) * batches
        if self._mesh.size("dp") > 1 and not self._weights.sums:
            dist.all_reduce(total, group=self._mesh.group("dp"))
        exact = torch.where(total > 0, 1.0 / total, 1.0)
        self.inverse = exact if first or self._seen_anywhere else _power_of_two(total)
        self.correction = exact / self.inverse

    def end_step(self, weight: Tensor) -> None:
        """Note the weight of the step over all ranks, on the device."""
        self._earlier = weight

    def _expected(self, micro_batches: MicroBatches) -> Tensor:
        """Weight of a batch of this rank, as far as it shows before the step has run."""
        real = micro_batches.batches[: len(micro_batches) - micro_batches.fillers]
        labels = [_labels_of(batch) for batch in real]
        if self._weights.counts_targets and all(any(value is not None for value in found) for found in labels):
            counts = [TokenMeanLoss.count_targets(*found) for found in labels]
            return torch.stack(counts).sum().to(self._device, torch.float64) if counts else self._number(0)
        return self._number(len(real) if self._weights.equal else micro_batches.rows * len(real))

    def _number(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device=self._device)  # torch.tensor would synchronize

    def check(self, totals: BatchTotals, *, begins: bool, ends: bool) -> None:
        """Refuse hooks that got gradients of another size than on one process.

        Args:
            totals: of one batch.
            begins: whether it is the first batch of its step.
            ends: whether it is the last one.

        Raises:
            ConfigError: on all ranks.
        """
        self._weight = totals.weight + (0.0 if begins else self._weight)
        self._seen_anywhere = self._seen_anywhere or totals.seeing > 0
        if totals.changing == 0 or not ends or self._weights.sums:
            return
        size = self._weight * float(self.inverse * self.correction)
        if self._weight > 0 and abs(size - 1) > 1e-6:
            raise ConfigError(
                "A hook changes gradients while the backward runs (Tensor.register_hook or register_full_backward_hook), but the weight of"
                f" the step was not known before: the hook got gradients {size:.4g} times as large as on one process. Register the hook in"
                ' each step, return a loss that is a mean over rows or that the model computes from "labels" in the batch, and use'
                " accumulate_grad_batches=1. Or change gradients of parameters in on_before_optimizer_step."
            )


def _power_of_two(weight: Tensor) -> Tensor:
    return torch.where(weight > 0, torch.exp2(-weight.clamp(min=1e-30).log2().round()), 1.0)


def _labels_of(batch: Any) -> tuple[Any, Any]:
    """Labels, and shifted labels, of a batch that is a mapping; None for what is not there."""
    found = batch if isinstance(batch, Mapping) else {}
    return found.get("labels"), found.get("shift_labels")
