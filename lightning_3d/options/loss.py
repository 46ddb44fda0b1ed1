"""Terms of the loss beyond cross-entropy. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.errors import ConfigError, did_you_mean, listed
from lightning_3d.layout.sizes import check_number

MEAN, SUM, ACCUMULATE = "mean", "sum", "accumulate"

REDUCTIONS = (MEAN, SUM, ACCUMULATE)
"""How the losses of micro-batches and data-parallel ranks become the loss of the global batch."""


@dataclass(frozen=True)
class LossOptions:
    """Terms of the loss of each target token in training: arguments of `Lightning3DStrategy` and
    keys of the group `parallelism`.

    With logits x over a vocabulary of V tokens, Z = sum(exp(x)) and the target t, the loss of a
    token is

        log Z - (1 - label_smoothing) x_t - label_smoothing / V sum(x) + z_loss (log Z) ** 2

    They belong to the loss that a causal LM of Transformers computes from labels. Validation and
    tests compute the cross-entropy alone.

    Attributes:
        label_smoothing: share of the target distribution that is spread evenly over the vocabulary,
            0 to less than 1 (Szegedy et al., arXiv:1512.00567, section 7), as in
            `torch.nn.functional.cross_entropy`.
        z_loss: coefficient of the squared log Z, which keeps logits small (PaLM, arXiv:2204.02311,
            section 5, uses 1e-4).
        reduction: what the loss of a step is. "mean": a mean over its rows or target tokens, or one
            that the step weighs itself; "sum": a sum over its rows; "accumulate": anything, of
            which the mean over micro-batches is trained, as gradient accumulation does. None: a
            mean, which the first step of a fit proves.

    Raises:
        ConfigError: a number is out of range, or an unknown reduction.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str | None = None

    def __post_init__(self) -> None:
        check_number("label_smoothing", self.label_smoothing)
        check_number("z_loss", self.z_loss)
        if self.reduction not in (None, *REDUCTIONS):
            raise ConfigError(
                f"loss_reduction must be {listed(REDUCTIONS, last='or')}, or null; got"
                f' "{self.reduction}".{did_you_mean(str(self.reduction), REDUCTIONS)}'
            )
        if self.label_smoothing >= 1:
            raise ConfigError(
                "label_smoothing must be at least 0 and less than 1, for example 0.1; got"
                f" {self.label_smoothing:g}."
            )

    @property
    def asked_for(self) -> list[str]:
        """Names of the terms that are not zero."""
        return [name for name in ("label_smoothing", "z_loss") if getattr(self, name)]


CROSS_ENTROPY = LossOptions()
"""Cross-entropy alone."""
