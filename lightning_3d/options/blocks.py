"""Options of a model's blocks: recomputation, offload of activations, compilation, sequence
parallelism. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from lightning_3d.errors import ConfigError, LayoutError, did_you_mean
from lightning_3d.layout.schedules import find_schedule

RECOMPUTE = ("none", "selective", "full")

SUPPORTED = "supported"
"""Value of `BlockOptions.sequence_parallel` with which ranks on CPU compute as ranks on GPUs do by
default."""


@dataclass(frozen=True)
class BlockOptions:
    """Options of a model's blocks: arguments of `Lightning3DStrategy` and keys of the group
    `parallelism`.

    Attributes:
        recompute: part of a block that the backward pass recomputes instead of keeping it. "none":
            nothing. "selective": everything but the results of matrix products, fused attention and
            tensor-parallel sums, or everything but `recompute_keep`. "full": everything; only the
            block's input is kept. (Korthikanti et al., "Reducing Activation Recomputation in Large
            Transformer Models", arXiv:2205.05198.)
        recompute_every: number n of neighbouring blocks of which the first is recomputed; 1
            recomputes every block.
        recompute_keep: with "selective", names of ATen operators, such as "mm", whose results are
            kept; everything else in a block is recomputed. The results of tensor-parallel
            communication are always kept.
        offload_activations: whether to keep what the backward pass of a block needs in host memory.
        compile: whether to run `torch.compile` on each block.
        sequence_parallel: with tp > 1, whether to split the sequence over the ranks between the
            sharded layers of a block (Megatron's sequence parallelism, the same paper, section
            4.2.2). `SUPPORTED`: yes for Transformers models whose blocks support it. None: the
            same, unless the ranks communicate through gloo, where it is slower
            (`parallel.tensor.sequence_parallel.pays_off`).

    Raises:
        ConfigError: a value is unknown, or options exclude each other.
    """

    recompute: str = "none"
    recompute_every: int = 1
    recompute_keep: Sequence[str] | None = None
    offload_activations: bool = False
    compile: bool = False
    sequence_parallel: bool | str | None = None

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            hint = did_you_mean(str(self.recompute), RECOMPUTE)
            raise ConfigError(
                f'recompute must be none, selective or full; got "{self.recompute}".{hint}'
            )
        if (
            isinstance(self.recompute_every, bool)
            or not isinstance(self.recompute_every, int)
            or self.recompute_every < 1
        ):
            raise ConfigError(
                "recompute_every must be at least 1 (1 recomputes every block); got"
                f" {self.recompute_every}."
            )
        if self.recompute_every > 1 and self.recompute == "none":
            raise ConfigError(
                f"recompute_every={self.recompute_every} needs recompute=full or"
                " recompute=selective."
            )
        if isinstance(self.recompute_keep, str):
            raise ConfigError(
                f'recompute_keep must be a list; got "{self.recompute_keep}". Use'
                f" recompute_keep=[{self.recompute_keep}]."
            )
        if self.recompute_keep is not None:
            object.__setattr__(self, "recompute_keep", tuple(self.recompute_keep))
        if self.sequence_parallel not in (True, False, None, SUPPORTED):
            raise ConfigError(
                f"sequence_parallel must be true, false or null; got {self.sequence_parallel!r}."
            )
        if self.recompute_keep is not None and self.recompute != "selective":
            raise ConfigError(
                f"recompute_keep needs recompute=selective; got recompute={self.recompute}."
            )

    def require_suits(self, schedule: str, *, pp: int) -> None:
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
            option.name for option in fields(self) if tp > 1 or option.name != "sequence_parallel"
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
