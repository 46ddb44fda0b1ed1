"""Options of the loss. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.errors import ConfigError
from lightning_3d.options.schema import RESULT, OptionGroup, at_least, one_of, option

MEAN, SUM, ACCUMULATE = "mean", "sum", "accumulate"
"""How the losses of micro-batches and data-parallel ranks become the loss of the global batch."""


@dataclass(frozen=True, kw_only=True)
class LossOptions(OptionGroup):
    """Terms of the loss of each target token in training.

    With logits x over a vocabulary of V tokens, Z = sum(exp(x)) and the target t, the loss of a
    token is

        log Z - (1 - label_smoothing) x_t - label_smoothing / V sum(x) + z_loss (log Z) ** 2

    They belong to the loss that a causal LM of Transformers computes from labels. Validation and
    tests compute the cross-entropy alone. Label smoothing: Szegedy et al., arXiv:1512.00567,
    section 7; z-loss: PaLM, arXiv:2204.02311, section 5.

    Raises:
        ConfigError: a number is out of range, or an unknown reduction.
    """

    label_smoothing: float = option(
        0.0,
        "share of the target distribution that is spread evenly over the vocabulary, in the"
        " training loss that a model of Transformers computes",
        at_least(0),
        beyond_torch=RESULT,
    )
    z_loss: float = option(
        0.0,
        "coefficient of the squared log-sum-exp of a token's logits in that loss. It keeps logits"
        " small (PaLM uses 0.0001)",
        at_least(0),
        beyond_torch=RESULT,
    )
    loss_reduction: str | None = option(
        None,
        "what the loss of a step is: mean (over its rows or target tokens), sum (over its rows), or"
        " accumulate, which takes the mean over micro-batches of any loss. null takes a mean, and"
        " the first step of a fit proves that it is one",
        one_of(MEAN, SUM, ACCUMULATE, null=True),
    )

    def check_together(self) -> None:
        """Refuse a share of the target distribution that leaves nothing for the target."""
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
