"""What happens around the forward of a model's blocks: recomputation, offload of activations, compilation. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from lightning_3d.errors import ConfigError, LayoutError, did_you_mean
from lightning_3d.layout.schedules import find_schedule

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class BlockOptions:
    """Arguments of `Lightning3DStrategy` and keys of the group `parallelism`.

    Attributes:
        recompute: what of a block is computed a second time in the backward instead of being kept. "none". "selective": its attention
            but for the results of matrix products, or all but `recompute_keep`. "full": all; only the block's input is kept.
            (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.)
        recompute_every: of so many neighbouring blocks the first one is recomputed.
        recompute_keep: with "selective": names of ATen operators, such as "mm", whose results are kept; all else in a block is computed
            again. What tensor parallelism communicates is kept too.
        offload_activations: what the backward of a block needs waits in host memory.
        compile: `torch.compile` of each block.
        sequence_parallel: with tp > 1, blocks work on a part of the sequence between their cut layers (Megatron's sequence parallelism,
            the same paper, section 4.2.2). None: yes for models of Transformers whose blocks can.

    Raises:
        ConfigError: a word that does not exist, or options that exclude each other.
    """

    recompute: str = "none"
    recompute_every: int = 1
    recompute_keep: Sequence[str] | None = None
    offload_activations: bool = False
    compile: bool = False
    sequence_parallel: bool | None = None

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            hint = did_you_mean(str(self.recompute), RECOMPUTE)
            raise ConfigError(f'recompute is "{self.recompute}".{hint} It must be none, selective or full.')
        if isinstance(self.recompute_every, bool) or not isinstance(self.recompute_every, int) or self.recompute_every < 1:
            raise ConfigError(f"recompute_every is {self.recompute_every}; of at least 1 block one is recomputed.")
        if self.recompute_every > 1 and self.recompute == "none":
            raise ConfigError(f"recompute_every={self.recompute_every} needs recompute=full or recompute=selective.")
        if isinstance(self.recompute_keep, str):
            raise ConfigError(f'recompute_keep is a list of names: ["{self.recompute_keep}"].')
        if self.recompute_keep is not None:
            object.__setattr__(self, "recompute_keep", tuple(self.recompute_keep))
        if self.recompute_keep is not None and self.recompute != "selective":
            raise ConfigError(f"recompute_keep is for recompute=selective; recompute is {self.recompute}.")

    def require_suits(self, schedule: str, *, tp: int, pp: int, cp: int = 1) -> None:
        """Refuse what a layout and schedule cannot run.

        Raises:
            LayoutError: a selective recomputation, which runs once, where the backward of a block runs twice; a compiled one between
                tensor-parallel ranks; compiled blocks between context-parallel ranks.
        """
        if self.compile and cp > 1:
            raise LayoutError(
                f"compile=true cannot trace the attention of context-parallel ranks, and cp is {cp}. Leave compile out, or use cp 1."
            )
        if self.recompute == "selective" and self.compile and tp > 1:
            raise LayoutError(
                "recompute=selective with compile=true cannot be traced through layers that are cut, and tp is above 1. Use recompute=full,"
                " or leave one of the two out."
            )
        if self.recompute == "selective" and pp > 1 and find_schedule(schedule).split_backward:
            raise LayoutError(
                f"recompute=selective keeps results for one backward of a block, but {schedule} computes gradients of inputs and of weights"
                " at different times. Use recompute=full, or 1F1B."
            )

    def recomputes(self, index: int) -> bool:
        """Whether block `index`, counted in the whole model, is recomputed."""
        return self.recompute != "none" and index % self.recompute_every == 0

    @property
    def changes_blocks(self) -> bool:
        """Whether anything is asked for."""
        return self.recompute != "none" or self.offload_activations or self.compile

    def differences(self, other: BlockOptions, *, tp: int) -> list[str]:
        """Options that are others in `other`, as `recompute=none, not full`. Without tensor parallelism no sequence is dealt out."""
        names = (option.name for option in fields(self) if tp > 1 or option.name != "sequence_parallel")
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return [f"{name}={ours}, not {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]

    def describe(self) -> str:
        """In a few words; empty when nothing is asked for."""
        often = f" of one block in {self.recompute_every}" if self.recompute_every > 1 else ""
        words = [f"{self.recompute} recomputation{often}"] if self.recompute != "none" else []
        words += ["activations offloaded"] * self.offload_activations + ["compiled"] * self.compile
        return ", ".join(words)
