"""The ways in which a fit can end on a rank: normally, together with the other ranks, or alone."""

from __future__ import annotations

from enum import Enum, auto

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_3d.checkpoint.outcome import NotSaved
from lightning_3d.errors import ArithmeticFault, NonFiniteError, ReplicaError


class Ending(Enum):
    """The ending of a fit; NORMAL while it runs."""

    NORMAL = auto()
    """Without an error, or with a last checkpoint that could not be written: the model is whole and
    ranks can communicate."""

    TOGETHER = auto()
    """With an error that all ranks raise at the same place (SIGTERM, a step that is not finite,
    ranks that differ), so that they can still communicate."""

    ALONE = auto()
    """With an error of which the other ranks know nothing: any collective would wait for them until
    its timeout."""

    @classmethod
    def by(cls, error: BaseException) -> Ending:
        """The ending that `error` brings about."""
        if isinstance(error, (SIGTERMException, NonFiniteError, ReplicaError, ArithmeticFault)):
            return cls.TOGETHER
        return cls.NORMAL if isinstance(error, NotSaved) else cls.ALONE
