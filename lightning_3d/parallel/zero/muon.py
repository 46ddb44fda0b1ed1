"""Muon for weight matrices and AdamW for everything else, in one optimizer.

Muon (https://kellerjordan.github.io/posts/muon) orthogonalizes the momentum of a whole matrix. The
momentum itself, the weight decay and the addition of the update are elementwise, so they are
sharded as the state of any other optimizer. Where ranks hold parts of matrices, `MatrixExchange`
brings the momentum of each matrix to one rank of the stage, which orthogonalizes it, and returns
the update to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_3d.compat.muon import adjusted_lr, orthogonalize, require_muon
from lightning_3d.errors import ConfigError, listed
from lightning_3d.parallel.zero.matrices import HeldPiece, require_matrices

if TYPE_CHECKING:
    from lightning_3d.parallel.zero.matrices import MatrixExchange


MUON, ADAMW = "muon", "adamw"
"""Values of the option `algorithm` of a parameter group."""

MOMENTUM = "momentum_buffer"
"""Key of the momentum in the state, as torch.optim.Muon has it."""


class MuonWithAdamW(torch.optim.AdamW):
    """Steps each parameter group with the algorithm that its option `algorithm` names: "muon", or
    "adamw" (the default).

    On one process it computes what `torch.optim.Muon` and `torch.optim.AdamW` compute. A parameter
    with three dimensions in a group of Muon is a stack of matrices, the weights of experts for
    example, each of which is orthogonalized by itself.

    Args:
        params: parameter groups.
        lr: learning rate of all groups that have none of their own.
        betas, eps: those of AdamW.
        weight_decay: decoupled weight decay.
        momentum, nesterov: those of Muon.
        ns_steps: Newton-Schulz iterations, the same in all groups: a rank iterates matrices of
            other ranks too.
        adjust_lr_fn: how Muon scales the learning rate by the shape of a matrix. "match_rms_adamw"
            makes updates as large as AdamW's, so that both can have one learning rate; "original"
            is the rule of the first publication.

    Raises:
        ConfigError: torch has no Muon, a parameter in a group of Muon is neither a matrix nor a
            stack of matrices, or its groups have different `ns_steps`.
    """

    shares_matrices = True
    """Matrices are stepped as wholes, whatever parts of them ranks have."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
    ) -> None:
        require_muon()
        own = {
            "algorithm": ADAMW,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(
            [{**own, **group} for group in params],
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
        require_matrices(
            [
                tuple(parameter.shape)
                for group in self.matrix_groups
                for parameter in group["params"]
            ]
        )
        self._ns_steps = ns_steps
        self._exchange: MatrixExchange | None = None
        self._steps()

    @property
    def matrix_groups(self) -> list[dict[str, Any]]:
        """The parameter groups that Muon steps."""
        return [group for group in self.param_groups if group.get("algorithm") == MUON]

    def share_matrices(self, exchange: MatrixExchange) -> None:
        """Let the ranks of a stage step matrices together: `step_matrices` does, and `step` then
        leaves them as they are."""
        self._exchange = exchange

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the groups of AdamW and, unless they are shared with other ranks, the matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._exchange is None:
            for averaged in self._average(lambda tensor: tensor.grad):
                for matrix, target in zip(
                    _stacked(averaged.direction()), _stacked(averaged.tensor), strict=True
                ):
                    averaged.add_to(
                        target,
                        orthogonalize(matrix.to(torch.bfloat16, copy=True), self._steps()),
                        matrix.shape,
                    )
        groups = self.param_groups
        self.param_groups = [group for group in groups if group.get("algorithm") != MUON]
        try:
            super().step()
        finally:
            self.param_groups = groups
        return loss

    @torch.no_grad()
    def step_matrices(self, gradient_of: Callable[[Tensor], Tensor | None]) -> None:
        """Step the matrices that the ranks of a stage share. All of them call it, before `step`.

        Args:
            gradient_of: returns the gradient of a tensor in a group, or None where no rank has one;
                the tensor then stays as it is.
        """
        assert self._exchange is not None
        found = {id(averaged.tensor): averaged for averaged in self._average(gradient_of)}

        def give(held: HeldPiece) -> Tensor:
            averaged = found.get(id(held.tensor))
            return (
                held.tensor.new_zeros(held.piece.numel)
                if averaged is None
                else averaged.direction(held.part_of)
            )

        def take(held: HeldPiece, first: int, update: Tensor) -> None:
            averaged = found.get(id(held.tensor))
            if averaged is not None:
                target = held.part_of(held.tensor)[first : first + len(update)]
                averaged.add_to(target, update, held.piece.spec.global_shape)

        self._exchange.run(give, lambda matrix: orthogonalize(matrix, self._steps()), take)

    def _average(self, gradient_of: Callable[[Tensor], Tensor | None]) -> list[_Averaged]:
        """Add gradients to the momenta, and decay the weights."""
        found = []
        for group in self.matrix_groups:
            for tensor in group["params"]:
                gradient = gradient_of(tensor)
                if gradient is None:
                    continue
                state = self.state[tensor]
                if MOMENTUM not in state:
                    state[MOMENTUM] = torch.zeros_like(tensor)
                state[MOMENTUM].lerp_(gradient, 1 - group["momentum"])
                tensor.mul_(1 - float(group["lr"]) * group["weight_decay"])
                found.append(_Averaged(tensor, gradient, state[MOMENTUM], group))
        return found

    def _steps(self) -> int:
        """Newton-Schulz iterations: those of all groups, which a checkpoint may have changed.

        Raises:
            ConfigError: groups have different ones.
        """
        found = sorted({int(group["ns_steps"]) for group in self.matrix_groups})
        if len(found) > 1:
            raise ConfigError(
                f"All parameter groups of Muon must have the same ns_steps; got {listed(found)}."
                f" Use ns_steps={found[-1]}."
            )
        return found[0] if found else self._ns_steps


@dataclass(frozen=True)
class _Averaged:
    """A tensor in a group of Muon, its gradient and momentum."""

    tensor: Tensor
    gradient: Tensor
    momentum: Tensor
    group: dict[str, Any]

    def direction(self, part_of: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """What is orthogonalized, or a part of it."""
        average = part_of(self.momentum)
        return (
            part_of(self.gradient).lerp(average, self.group["momentum"])
            if self.group["nesterov"]
            else average
        )

    def add_to(self, target: Tensor, update: Tensor, shape: Sequence[int]) -> None:
        """Step weights by a part of the update of a matrix of this shape."""
        target.add_(update, alpha=-adjusted_lr(self.group["lr"], self.group["adjust_lr_fn"], shape))


def _stacked(tensor: Tensor) -> Iterable[Tensor]:
    """Views of the matrices in a parameter."""
    return (tensor,) if tensor.ndim == 2 else tensor.unbind()
