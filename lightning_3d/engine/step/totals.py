"""The numbers of one batch that all ranks share, in one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lightning_3d.errors import ConfigError

DIFFERENT_NAMES = (
    "The names passed to self.log in a step differ between data-parallel ranks. Log the same names"
    " on all of them."
)


@dataclass(frozen=True)
class BatchTotals:
    """Sums over the micro-batches of a batch and over the ranks that ran its last stage.

    Attributes:
        loss: losses times weights.
        weight: target tokens (or rows).
        scaled: weights as the backward had them, see `LossScale`.
        seeing: number of ranks where code of the user's sees gradients while a backward runs.
        changing: number of those where it changes them by hooks.
        log_keys: checksums of the log keys of each rank, see `StepLog.checksum`.
        log_keys_squared: their squares, which show whether all checksums are equal.
        sources: number of ranks that ran the last stage.
        with_extras: number of those whose step returned more than a loss.
    """

    loss: float
    weight: float
    scaled: float
    seeing: float
    changing: float
    log_keys: float
    log_keys_squared: float
    sources: float
    with_extras: float

    @staticmethod
    def pack(
        sums: Sequence[Tensor], log_keys: float, *, extras: bool, device: torch.device
    ) -> Tensor:
        """Pack what this rank, which ran the last stage, adds to the totals.

        Args:
            sums: (loss times weight, weight, scaled weight) of each micro-batch, float64 on
                `device`, so that the host need not wait.
            log_keys: checksum of the keys that the step logged.
            extras: the step returned more than a loss.

        Returns:
            A float64 tensor with one element for each field.
        """
        packed = BatchTotals.nothing(device)
        if sums:
            packed[:3] = torch.stack(list(sums)).sum(0)
        for place, number in enumerate((log_keys, log_keys**2, 1.0, float(extras)), 5):
            packed[place].fill_(number)  # a copy from the host would wait
        return packed

    @classmethod
    def nothing(cls, device: torch.device) -> Tensor:
        """Pack what a rank before the last stage adds."""
        return torch.zeros(len(fields(cls)), dtype=torch.float64, device=device)

    @classmethod
    def unpack(cls, packed: Tensor) -> BatchTotals:
        """Read the sums over all ranks. Waits for the device."""
        return cls(*packed.tolist())

    @staticmethod
    def weight_in(packed: Tensor) -> Tensor:
        """Take the weight, of shape (), out of packed totals, without waiting for the device."""
        return packed[1]

    @staticmethod
    def scaled_in(packed: Tensor) -> Tensor:
        """Take the weight that the backward had, of shape (), out of packed totals, without waiting
        for the device."""
        return packed[2]

    @staticmethod
    def note_hooks(packed: Tensor, *, sees: bool, changes: bool) -> None:
        """Add to packed totals whether code of the user's sees gradients on this rank, and changes
        them."""
        packed[3].fill_(float(sees))
        packed[4].fill_(float(changes))

    @staticmethod
    def mean_in(packed: Tensor) -> Tensor:
        """Compute `mean_loss`, of shape (), from packed totals, without waiting for the device."""
        return torch.where(packed[1] > 0, packed[0] / packed[1], torch.nan)

    def require_equal_keys(self) -> None:
        """Refuse ranks that logged different names.

        Numbers are equal if and only if the square of their sum equals the sum of their squares
        times their count (Cauchy-Schwarz). All three are whole numbers below 2**53, so equal
        checksums are never refused because of rounding.

        Raises:
            ConfigError: on every rank.
        """
        if self.log_keys_squared * self.sources != self.log_keys**2:
            raise ConfigError(DIFFERENT_NAMES)

    @property
    def mean_loss(self) -> float:
        """Mean over the global batch; NaN where no target token has a weight."""
        return self.loss / self.weight if self.weight > 0 else float("nan")

    @property
    def checksum(self) -> int:
        """Checksum of the log keys, the same on all ranks that ran the last stage; 0 where nothing
        was logged."""
        return round(self.log_keys / self.sources)

    @property
    def extras(self) -> bool:
        """True where a step returned more than a loss."""
        return self.with_extras > 0
