"""Lets Lightning's `ModelSummary` show the whole model, and how much of it this rank keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_3d.compat.lightning_summary import Sizes, summarize_whole

if TYPE_CHECKING:
    from lightning_3d.engine.built_model import BuiltModel


def show_whole_model(trainer: pl.Trainer) -> None:
    """Change the summaries of a Trainer, once. Called when this rank has its part of the model."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary) and "on_fit_start" not in vars(callback):
            callback.on_fit_start = partial(_without_example, callback.on_fit_start)  # type: ignore[method-assign]
            summarize_whole(callback, _sizes, _show_share)


def _sizes(trainer: pl.Trainer) -> Sizes | None:
    built: BuiltModel | None = getattr(trainer.strategy, "built", None)
    if built is None:  # the callback is used again, with another strategy
        return None
    size, share = built.parts.size, built.share
    names = {id(parameter): name for name, parameter in built.module.named_parameters()}

    def here(module: str) -> int:
        return sum(
            share[names[id(parameter)]]
            for parameter in built.module.get_submodule(module).parameters()
        )

    split = sum(share.values()) < size.count()
    return Sizes(size.count, here, size.types, size.modes, split)


def _show_share(sizes: Sizes) -> None:
    share, whole = (
        get_human_readable_count(number).strip() for number in (sizes.share(""), sizes.whole())
    )
    rank_zero_info(f"Rank 0 keeps {share} of the {whole} parameters of the model.")


def _without_example(
    on_fit_start: Callable[..., None], trainer: pl.Trainer, module: pl.LightningModule
) -> None:
    """Summarize without the sizes of inputs and outputs where layers of the model are on several
    ranks, or the module has no forward: Lightning would call all of it."""
    layout: Any = getattr(trainer.strategy, "layout", None)
    if layout is None or (layout.pp == 1 and is_overridden("forward", module)):
        on_fit_start(trainer, module)
        return
    example, module.example_input_array = module.example_input_array, None
    try:
        on_fit_start(trainer, module)
    finally:
        module.example_input_array = example
