"""Options of a model's blocks: recomputation, offload of activations, compilation, sequence
parallelism. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout.schedules import find_schedule
from lightning_3d.options.schema import SPEED, OptionGroup, one_of, option, options_of

RECOMPUTE = ("none", "selective", "full")

SUPPORTED = "supported"
"""Value of `BlockOptions.sequence_parallel` with which ranks on CPU compute as ranks on GPUs do by
default."""


def _check_every(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be at least 1 (1 recomputes every block); got {value}.")


def _check_keep(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise ConfigError(f'{name} must be a list; got "{value}". Use {name}=[{value}].')


def _check_sequence_parallel(name: str, value: Any) -> None:
    if value not in (True, False, None, SUPPORTED):
        raise ConfigError(f"{name} must be true, false or null; got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class BlockOptions(OptionGroup):
    """Options of a model's blocks.

    Recomputation and sequence parallelism: Korthikanti et al., "Reducing Activation Recomputation
    in Large Transformer Models", arXiv:2205.05198. `sequence_parallel` may also be `SUPPORTED`: yes
    for models whose blocks support it.

    Raises:
        ConfigError: a value is unknown, or options exclude each other.
    """

    recompute: str = option(
        "none",
        "what to recompute in the backward instead of storing it. none recomputes nothing."
        " selective stores the results of products, fused attention and tensor-parallel sums. full"
        " stores only the input of a block and recomputes the rest",
        one_of(*RECOMPUTE),
    )
    recompute_every: int = option(
        1, "recompute one of every n blocks. 1 recomputes every block", _check_every
    )
    recompute_keep: Sequence[str] | None = option(
        None,
        "with recompute=selective, store the results of these operators, such as [mm, addmm], and"
        " recompute the rest of the block",
        _check_keep,
    )
    offload_activations: bool = option(
        False, "true keeps in host memory the activations that the backward of a block needs"
    )
    compile: bool = option(False, "true applies torch.compile to each block", beyond_torch=SPEED)
    sequence_parallel: bool | None = option(
        None,
        "with tp above 1, true makes each tensor-parallel rank work on a part of the sequence"
        " between sharded layers. null means true on GPUs if the model supports it, and false on"
        " CPU, where it is slower",
        _check_sequence_parallel,
    )

    def check_together(self) -> None:
        """Refuse options that exclude each other."""
        if self.recompute_every > 1 and self.recompute == "none":
            raise ConfigError(
                f"recompute_every={self.recompute_every} needs recompute=full or"
                " recompute=selective."
            )
        if self.recompute_keep is not None:
            object.__setattr__(self, "recompute_keep", tuple(self.recompute_keep))
        if self.recompute_keep is not None and self.recompute != "selective":
            raise ConfigError(
                f"recompute_keep needs recompute=selective; got recompute={self.recompute}."
            )

    def require_schedule(self, schedule: str, *, pp: int) -> None:
        """Refuse options that a schedule cannot run.

        Raises:
            LayoutError: selective recomputation with a schedule that splits the backward pass.
        """
        if self.recompute == "selective" and pp > 1 and find_schedule(schedule).split_backward:
            raise LayoutError(
                f"recompute=selective needs one backward pass for each block, but {schedule}"
                " computes the gradients of inputs and weights in separate passes. Use"
                " recompute=full, or the schedule 1F1B."
            )

    def recomputes(self, index: int) -> bool:
        """Check whether block `index`, counted in the whole model, is recomputed."""
        return self.recompute != "none" and index % self.recompute_every == 0

    @property
    def changes_blocks(self) -> bool:
        """True if any option changes how blocks run."""
        return self.recompute != "none" or self.offload_activations or self.compile

    def differences(self, other: BlockOptions, *, tp: int) -> list[str]:
        """List options that differ in `other`, as `recompute=none, not full`. `sequence_parallel`
        counts only with tp > 1."""
        names = (
            entry.name
            for entry in options_of(BlockOptions)
            if tp > 1 or entry.name != "sequence_parallel"
        )
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return [
            f"{name}={ours}, not {theirs}"
            for name, (ours, theirs) in pairs.items()
            if ours != theirs
        ]

    def describe(self) -> str:
        """Describe the options in a few words; empty when nothing changes."""
        often = f" of one block in {self.recompute_every}" if self.recompute_every > 1 else ""
        words = [f"{self.recompute} recomputation{often}"] if self.recompute != "none" else []
        words += ["activations offloaded"] * self.offload_activations + ["compiled"] * self.compile
        return ", ".join(words)
