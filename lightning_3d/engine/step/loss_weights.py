"""The weight of each micro-batch in the loss of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.engine.step.own_losses import count_own_losses
from lightning_3d.errors import ConfigError, PlanError, listed
from lightning_3d.options.loss import ACCUMULATE, CROSS_ENTROPY, SUM, LossOptions
from lightning_3d.parallel.context import (
    ContextParallel,
    WholeSequence,
    WholeSequenceLoss,
    is_split,
    sum_over_ranks,
)
from lightning_3d.parallel.tensor.loss import summed_losses

LossFunction = Callable[..., Tensor]


class LossWeights:
    """The weight of the micro-batch that is running.

    A loss that a model computes from its labels weighs as many target tokens as it averages over,
    any other loss as many rows, so that the weighted mean over micro-batches and data-parallel
    ranks equals the mean over the global batch. A step can declare another weight. All
    micro-batches weigh the same where the user has declared the loss a sum, or its micro-batches as
    accumulated.

    Args:
        terms: terms of the loss that a causal LM computes from its labels in training.

    Attributes:
        counts_targets: whether a model computes a loss from labels that is weighted by their target
            tokens.
        known: whether the weight that was read last was known before the step ran: rows, or equal
            weights.
    """

    counts_targets = known = False

    def __init__(self, terms: LossOptions = CROSS_ENTROPY) -> None:
        self.terms = terms
        self._training = True
        self._tokens: Tensor | None = None
        self._has_terms = False
        self._proves = False

    @property
    def sums(self) -> bool:
        """Whether the loss of the global batch is the sum of those of its micro-batches."""
        return self.terms.loss_reduction == SUM

    @property
    def equal(self) -> bool:
        """Whether all micro-batches weigh the same."""
        return self.terms.loss_reduction in (SUM, ACCUMULATE)

    def begin(self, *, training: bool = True, proves: bool = False) -> None:
        """Expect the next micro-batch, of training or of evaluation.

        Args:
            proves: whether its loss is compared with one that is trained on, though it has no
                gradients.
        """
        self._training, self._proves = training, proves
        self._tokens, self._has_terms = None, False

    @property
    def _wants_terms(self) -> bool:
        """Whether a loss that is computed now is trained on: not in evaluation, with or without
        gradients, and not without gradients."""
        return self._training and (self._proves or torch.is_grad_enabled())

    def use_terms(self) -> LossOptions:
        """Return the terms of a loss that is computed now: cross-entropy alone if it is not trained
        on."""
        self._has_terms = True
        return self.terms if self._wants_terms else CROSS_ENTROPY

    def count_tokens(self, tokens: Tensor) -> None:
        """Add target tokens. The loss function calls this; calls in one micro-batch add up."""
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def weight(self, rows: int, device: torch.device, declared: Any = None) -> Tensor:
        """Weight of the micro-batch: a float64 tensor of shape ().

        Args:
            declared: weight that the step returned; None where it returned none.

        Raises:
            PlanError: the loss should have further terms, but the model did not compute it.
            ConfigError: the declared weight is not a number.
        """
        if self.terms.asked_for and self._wants_terms and not self._has_terms:
            raise PlanError(
                f"{_described(self.terms)} no effect on the loss of this step, which no causal LM"
                " of Transformers computed from labels. Pass labels= to the model and return its"
                " loss, or set the option to 0 and add the term to the loss of your step."
            )
        self.known = (self.equal and self._training) or (declared is None and self._tokens is None)
        if self.equal and self._training:
            return torch.ones((), dtype=torch.float64, device=device)
        if declared is not None:
            return _declared(declared, device)
        if self._tokens is not None:
            return self._tokens.to(torch.float64)
        # torch.tensor would synchronize
        return torch.full((), float(rows), dtype=torch.float64, device=device)


def _declared(weight: Any, device: torch.device) -> Tensor:
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return weight.detach().reshape(()).to(device, torch.float64)
    if isinstance(weight, (int, float)):
        return torch.full((), float(weight), dtype=torch.float64, device=device)
    got = (
        f"a tensor of shape {tuple(weight.shape)}"
        if isinstance(weight, Tensor)
        else type(weight).__name__
    )
    raise ConfigError(
        f"The 'loss_weight' that training_step returns must be a single number; got {got}."
    )


class TokenMeanLoss:
    """Takes the place of a causal LM's `loss_function`: cross-entropy averaged over target tokens,
    on vocabulary shards.

    The signature is the one of Transformers' `ForCausalLMLoss`. `num_items_in_batch` is accepted
    and not used: the strategy normalizes by the target tokens of the global batch itself. With
    `further=True`, it is a second loss of the same micro-batch (`MultiTokenLM`): a sum divided by
    `num_items_in_batch`, the targets of the first one, which alone are counted.

    Args:
        weights: receives the number of target tokens.
        context: ranks that share the sequences, whose token losses are summed by one all-reduce of
            two numbers; None where logits and labels are of whole sequences, or logits report so
            (`WholeSequence`).
    """

    def __init__(self, weights: LossWeights, context: ContextParallel | None = None) -> None:
        self._weights = weights
        self._context = context

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        further: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        shift_labels, context = (
            _targets(labels, shift_labels, ignore_index).to(logits.device),
            self._context,
        )
        if isinstance(logits, WholeSequence):
            context, shift_labels = logits.context, logits.own(shift_labels)
            logits = logits.local
        if shift_labels.shape != logits.shape[:-1]:
            raise PlanError(
                f"loss_function got labels of shape {tuple(shift_labels.shape)}, which do not fit"
                f" logits of shape {tuple(logits.shape)}. In the model's forward, pass **kwargs"
                " (which contain shift_labels) to loss_function."
            )
        tokens = (shift_labels != ignore_index).sum()
        total = summed_losses(logits, shift_labels, ignore_index, self._weights.use_terms())
        if context is not None:
            sums = sum_over_ranks(torch.stack([total.double(), tokens.double()]), context)
            total, tokens = sums[0].to(total.dtype), sums[1].detach()
        if further:
            assert num_items_in_batch is not None
            return total / num_items_in_batch.to(total.dtype)
        self._weights.count_tokens(tokens)
        return total / tokens.to(total.dtype).clamp(min=1)

    @staticmethod
    def count_targets(labels: Tensor | None, shift_labels: Tensor | None) -> Tensor:
        """Count the target tokens that a call with these labels averages over."""
        return (_targets(labels, shift_labels, -100) != -100).sum()


def _targets(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """Select the token that each position predicts.

    Raises:
        PlanError: there are no labels.
    """
    if shift_labels is not None:
        return shift_labels
    if labels is None:
        raise PlanError(
            "The model called loss_function without labels. Pass labels or shift_labels to"
            " loss_function in the model's forward."
        )
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def weigh_loss(
    root: nn.Module, weights: LossWeights, context: ContextParallel | None = None
) -> None:
    """Replace the loss function of every causal LM in `root` that has the usual one by
    `TokenMeanLoss`.

    Other losses stay, and see the logits of all tokens and the full vocabulary. Those that code of
    Transformers computes from labels are weighted by target tokens, too; losses of the user's step,
    and loss functions of the user's own, by rows.

    Raises:
        PlanError: the loss should have further terms, but no model computes the usual one.
    """
    found = False
    for module in root.modules():
        if not hasattr(type(module), "loss_function") or _has_no_head(module):
            continue
        current, shared = module.loss_function, None if is_split(module) else context
        if (
            isinstance(current, TokenMeanLoss)
            or getattr(current, "__name__", "") == "ForCausalLMLoss"
        ):
            module.loss_function = TokenMeanLoss(weights, shared)  # type: ignore[assignment]
            found = True
        elif (
            shared is not None and callable(current) and not isinstance(current, WholeSequenceLoss)
        ):
            module.loss_function = WholeSequenceLoss(current, shared)
    weights.counts_targets = found
    if weights.terms.asked_for and not found:
        raise PlanError(
            f"{_described(weights.terms)} no effect: {type(root).__name__} contains no causal LM of"
            " Transformers with the usual loss function. Set the option to 0 and add the term to"
            " the loss of your step."
        )
    count_own_losses(root, weights.count_tokens)


def _described(terms: LossOptions) -> str:
    names = terms.asked_for
    return (
        f"{listed(f'{name}={getattr(terms, name):g}' for name in names)}"
        f" {'has' if len(names) == 1 else 'have'}"
    )


def _has_no_head(module: nn.Module) -> bool:
    """Return whether this is a Transformers model without an output head, whose loss function is
    never called."""
    outputs = getattr(module, "get_output_embeddings", None)
    return outputs is not None and outputs() is None
