"""Wrapper of a model whose forward sees a part of each sequence and whose caller sees all of it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.models.multi_token import MultiTokenLM
from lightning_3d.parallel.context.attention import Running, register, running
from lightning_3d.parallel.context.checks import replace_attention
from lightning_3d.parallel.context.following import TokensOfOthers
from lightning_3d.parallel.context.full_sequence import WholeSequence, whole_outputs
from lightning_3d.parallel.context.group import ContextParallel
from lightning_3d.parallel.context.inputs import named_arguments, refuse_arguments, tokens_of
from lightning_3d.parallel.context.masks import mask_of_batch
from lightning_3d.parallel.context.split_blocks import SplitBlocks
from lightning_3d.parallel.context.zigzag import positions as zigzag
from lightning_3d.parallel.specialize import specialize

IGNORED = -100
"""The label of tokens that are not targets, in Transformers."""


def share_sequences(
    module: nn.Module, blocks: list[nn.Module], layers: str, context: ContextParallel
) -> SplitBlocks | None:
    """Make `module`, a whole Transformers model, run on this rank's part of the sequences that it
    is called with. In place.

    Where only the attention mixes tokens, it is replaced, and nothing is left to do: None.
    Otherwise the result says how to split the sequence between blocks.

    Args:
        blocks: as `find_blocks` returns them.
        layers: name of the list of blocks; empty if the plan does not say it.

    Raises:
        PlanError: not a model of Transformers, or its blocks are unknown.
    """
    register()
    if not replace_attention(module, blocks):
        return SplitBlocks.of(module, blocks, layers, context)
    counts = next(
        (
            child
            for child in module.modules()
            if hasattr(child, "create_position_ids_from_input_ids")
        ),
        None,
    )
    if isinstance(module, MultiTokenLM):
        specialize(module, TokensOfOthers)
    specialize(
        module,
        SharedSequences,
        context_parallel=context,
        context_layers={},
        context_positions=counts,
    )
    return None


class SharedSequences:
    """Mixin for the model: shards its inputs along the sequence, and returns outputs that report
    the full shape."""

    context_parallel: ContextParallel
    context_layers: dict[Any, bool]
    context_positions: Any  # the module that does not count tokens from 0, or None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context = self.context_parallel
        own = super().forward  # type: ignore[misc]
        arguments = named_arguments(own, args, kwargs)
        call, arguments = _cut(
            arguments,
            context,
            self.context_layers,
            _own_positions(self.context_positions, arguments),
        )
        with running(call):
            output = own(**arguments)
        if not call.mask.use.attended:
            raise PlanError(
                f"No attention module of {type(self).__name__} used Transformers' attention"
                " interface, so no token attended to the tokens of other context-parallel ranks."
                " Use cp=1."
            )
        return whole_outputs(output, (call.rows, call.positions.shape[1]), context)


class WholeSequenceLoss:
    """Wrapper of a loss function of the user's own, which sees the logits and labels of the whole
    sequence."""

    def __init__(self, loss: Any, context: ContextParallel) -> None:
        self._loss, self._context = loss, context

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        *args: Any,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        return self._loss(WholeSequence(logits, self._context).full(), labels, *args, **kwargs)

    @property
    def inner(self) -> Any:
        """Loss function that is wrapped."""
        return self._loss


def _own_positions(owner: Any, arguments: dict[str, Any]) -> Tensor | None:
    """(batch, seq): the positions that the model would give whole sequences, where it counts
    otherwise than from 0 (RoBERTa from behind the number of its padding). None: from 0, or the
    caller gives them.

    Raises:
        PlanError: they depend on tokens that the caller does not give.
    """
    if owner is None or arguments.get("position_ids") is not None:
        return None
    ids = arguments.get("input_ids")
    if ids is None:
        raise PlanError(
            f"{type(owner).__name__} derives positions from the tokens. With context parallelism"
            " (cp), call the model with input_ids or with position_ids."
        )
    positions: Tensor = owner.create_position_ids_from_input_ids(ids, owner.padding_idx)
    return positions


def _cut(
    arguments: dict[str, Any],
    context: ContextParallel,
    layers: dict[Any, bool],
    own_positions: Tensor | None,
) -> tuple[Running, dict[str, Any]]:
    """This rank's part of the arguments, and the information about the others that its attention
    needs.

    Args:
        own_positions: (batch, seq), where the model does not count tokens from 0.
    """
    refuse_arguments(arguments)
    keep = arguments.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise ConfigError(
            "logits_to_keep is not supported with cp > 1: it would keep the last tokens of every"
            " rank. Slice the logits instead."
        )
    tokens = tokens_of(arguments)
    batch, length = tokens.shape[:2]
    labels = arguments.get("labels")
    if labels is not None and arguments.get("shift_labels") is None:
        arguments["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    whole = arguments.pop("position_ids", None)
    mask = mask_of_batch(context, (batch, length), arguments.get("attention_mask"), whole)
    order = zigzag(length, context.size, context.rank, tokens.device)
    arguments = {
        name: (
            value[:, order]
            if name != "labels"
            and isinstance(value, Tensor)
            and tuple(value.shape[:2]) == (batch, length)
            else value
        )
        for name, value in arguments.items()
    }
    positions = order.unsqueeze(0) if whole is None else whole[:, order]
    arguments["position_ids"] = positions if own_positions is None else own_positions[:, order]
    return Running(mask, positions, batch, layers), arguments
