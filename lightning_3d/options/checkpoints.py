"""Options of checkpoints. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.options.schema import OptionGroup, at_least, option


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(OptionGroup):
    """Options for saving and loading checkpoints."""

    checkpoint_verify: bool = option(
        True, "compare every file of a checkpoint with its hash before loading anything"
    )
    checkpoint_fall_back: bool = option(
        False,
        "true loads the newest intact checkpoint in the same folder if the requested one is"
        " damaged",
    )
    checkpoint_asynchronous: bool = option(
        True, "write checkpoints in the background during a fit, from copies in host memory"
    )
    checkpoint_timeout_seconds: float = option(
        1800.0,
        "end the run if a save takes longer than this, for example because the disk hangs",
        at_least(1),
    )
    checkpoint_check_space: bool = option(
        True, "refuse a fit before its first step if its checkpoints cannot fit on the local disk"
    )
