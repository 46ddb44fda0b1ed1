"""Frozen second models, such as a teacher, that run on this rank's part of the sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_3d.parallel.context.attention import NAME, register
from lightning_3d.parallel.context.checks import set_attention
from lightning_3d.parallel.context.group import ContextParallel
from lightning_3d.parallel.context.inputs import named_arguments, splits
from lightning_3d.parallel.context.model import SharedSequences
from lightning_3d.parallel.specialize import specialize


def share_frozen(module: nn.Module, context: ContextParallel) -> None:
    """Make a frozen model, of which `checks.mixes_by_attention` is true, run on this rank's part of
    the sequences. In place.

    The trained model must be called with sequences that the ranks can split. A frozen one may be
    called with others, or in parts, or generate text: then it runs whole sequences with its own
    attention, on every rank.
    """
    register()
    # without its kernels, which are chosen for the whole process, by the trained model
    before = set_attention(module)
    if before is None:
        return
    for config, implementation in before:
        config._attn_implementation = implementation
    specialize(
        module,
        SharedFrozen,
        context_parallel=context,
        context_layers={},
        context_positions=None,
        context_attentions=before,
    )


class SharedFrozen(SharedSequences):
    """Mixin for a frozen model: as `SharedSequences` in calls whose sequences the ranks can split.

    Attributes:
        context_attentions: the model's configurations, each with the attention that it has outside
            of such calls.
    """

    context_attentions: list[tuple[Any, str]]
    config: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole = super(SharedSequences, self).forward  # type: ignore[misc]
        # which are not (batch, sequence, ...)
        routes = getattr(self.config, "output_router_logits", False)
        if routes or not splits(named_arguments(whole, args, kwargs), self.context_parallel.size):
            return whole(*args, **kwargs)
        with self._replaced_attention():
            return super().forward(*args, **kwargs)

    @contextmanager
    def _replaced_attention(self) -> Iterator[None]:
        try:
            for config, _ in self.context_attentions:
                config._attn_implementation = NAME
            yield
        finally:
            for config, implementation in self.context_attentions:
                config._attn_implementation = implementation
