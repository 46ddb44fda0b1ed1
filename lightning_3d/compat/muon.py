"""The orthogonalization of `torch.optim.Muon`, which is not public: in bfloat16, so that only the
same operations give the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING

from lightning_3d.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def require_muon() -> None:
    """Refuse a version of torch without Muon.

    Raises:
        ConfigError: torch has no `torch.optim.Muon`, or keeps its functions elsewhere.
    """
    import torch

    try:
        from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Muon needs the functions of torch.optim.Muon as torch 2.13 has them; this is torch"
            f" {torch.__version__}. Install torch 2.13, or use another optimizer, for example"
            " optimizer=adamw."
        ) from error


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Compute the update of Muon by Newton-Schulz iterations
    (`torch.optim._muon._zeropower_via_newtonschulz`, torch 2.13).

    Args:
        matrix: the momentum (rows, columns) in bfloat16. It is overwritten.
        steps: number of iterations.

    Returns:
        A matrix of the same shape in bfloat16, with singular values near 1.
    """
    import torch
    from torch.optim._muon import _zeropower_via_newtonschulz

    defaults = signature(torch.optim.Muon).parameters
    return _zeropower_via_newtonschulz(
        matrix, defaults["ns_coefficients"].default, steps, defaults["eps"].default
    )


def adjusted_lr(lr: float | Tensor, rule: str | None, shape: Sequence[int]) -> float:
    """Scale a learning rate for a matrix of this shape (`torch.optim._muon._adjust_lr`, torch
    2.13).

    Args:
        lr: learning rate of the parameter group.
        rule: "original", "match_rms_adamw", or None, which is "original".
        shape: shape of the whole matrix.
    """
    import torch
    from torch.optim._muon import _adjust_lr

    return _adjust_lr(float(lr), rule, torch.Size(shape))
