"""All options of the engine and the strategy in one group. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass
from types import MappingProxyType
from typing import Any

from lightning_3d.options.blocks import BlockOptions
from lightning_3d.options.checkpoints import CheckpointOptions
from lightning_3d.options.experts import ExpertOptions
from lightning_3d.options.layout import LayoutOptions
from lightning_3d.options.loss import LossOptions
from lightning_3d.options.model import ModelArguments
from lightning_3d.options.own_model import OwnModelOptions
from lightning_3d.options.schema import options_of
from lightning_3d.options.script import ScriptOptions
from lightning_3d.options.zero import ZeroArguments


# The last base comes first in signatures, YAML and docs.
@dataclass(frozen=True, kw_only=True)
class Options(
    ScriptOptions,
    OwnModelOptions,
    CheckpointOptions,
    ExpertOptions,
    LossOptions,
    BlockOptions,
    ZeroArguments,
    ModelArguments,
    LayoutOptions,
):
    """Options of the engine and the strategy: `Options("tp2_dp2", zero_stage=1)`.

    Raises:
        LayoutError, ConfigError: the message says what is wrong and what works.
    """


COMMAND_LINE_DEFAULTS: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "layout": (
            "tp1",
            "the command line starts the ranks of the layout, and must know their number",
        ),
        "zero_stage": (
            1,
            (
                "every optimizer of the command line can be sharded, and each rank needs less"
                " memory; a script may bring any"
            ),
        ),
        "micro_batch_size": (
            2,
            (
                "the command line knows the rows of a global batch; a script has those of its"
                " loader, whole if it can"
            ),
        ),
    }
)
"""Defaults on the command line that differ from those in a script, with the reasons."""

OPEN = ("order", "zero_stage", "recompute", "micro_batch_size")
"""Options that `parallelism=auto` leaves open (null), for the planner to choose."""


def command_line_options() -> tuple[Field[Any], ...]:
    """Return the options that are keys of the group `parallelism`."""
    elsewhere = {entry.name for entry in options_of(ScriptOptions)}
    return tuple(entry for entry in options_of(Options) if entry.name not in elsewhere)


def command_line_default(entry: Field[Any]) -> Any:
    """Return the default of an option on the command line."""
    return (
        COMMAND_LINE_DEFAULTS[entry.name][0]
        if entry.name in COMMAND_LINE_DEFAULTS
        else entry.default
    )
