"""Reactions to a loss or a gradient norm that is not finite. Imports torch only when a step has
failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from lightning_3d.errors import NonFiniteError, listed
from lightning_3d.health.loss_spikes import LossSpikes, Spike
from lightning_3d.options.reliability import IGNORE, REPORT, RERUN, STOP

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lightning_3d.layout.layout import Layout
    from lightning_3d.parallel.zero import DataParallelBackend


_MOST_NAMED = 8
"""Ranks that a message lists."""


@dataclass(frozen=True)
class Found:
    """Ranks where values are not finite; the same on every rank.

    Attributes:
        data: data-parallel ranks whose own part of the loss is not finite.
        ranks: ranks whose part of the reduced gradient is not finite.
        weights: ranks whose weights are not finite.
        names: parameters that are not finite there.
    """

    data: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


class StepGuard:
    """Judges every optimizer step before its weights change.

    The loss and the gradient norm that it reads are the same on all ranks, so that all decide alike
    without communication.

    Args:
        how: "stop" ends the run, "skip" skips the optimizer step, "ignore" steps as with any other
            gradient.
        most_skipped: number of steps skipped in a row that ends a run: by then the weights are the
            cause, not the data.
        spikes: finds losses that jump; None where nobody wants to know.
        on_spike: "report" warns, "skip" also skips the optimizer step, "rerun" also computes the
            step again first.

    Attributes:
        skipped: number of steps of this fit that were skipped.
    """

    def __init__(
        self,
        how: str = STOP,
        most_skipped: int = 100,
        spikes: LossSpikes | None = None,
        on_spike: str = REPORT,
    ) -> None:
        self.on_spike = on_spike
        self.how, self._most_skipped, self._spikes = how, most_skipped, spikes
        self.begin()

    def begin(self) -> None:
        """Forget the previous fit."""
        self.skipped = self._in_a_row = 0
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the batches of the previous step."""
        self.loss: float | None = None
        self.lost_here = False

    def note(self, loss: float, weight: float, lost_here: bool) -> None:
        """Note the loss of one batch. A batch without any target has no loss, which is not a
        failure of the model.

        Args:
            weight: target tokens of the global batch.
            lost_here: whether this rank's own part of the loss is not finite.
        """
        if weight > 0 and (self.loss is None or isfinite(self.loss)):
            self.loss, self.lost_here = loss, lost_here

    def find_spike(self) -> Spike | None:
        """Return the jump of the loss of this step, or None. Call it once for each step."""
        return (
            self._spikes.judge(self.loss)
            if self._spikes is not None and self.loss is not None
            else None
        )

    def accepts(self, norm: float) -> bool:
        """Return whether the optimizer may step with the gradients of all batches of the step."""
        finite = isfinite(norm) and (self.loss is None or isfinite(self.loss))
        if finite:
            self._in_a_row = 0
        return finite or self.how == IGNORE

    @property
    def can_judge_later(self) -> bool:
        """Whether the device can decide about a step, by `finite` alone, and the host look at its
        numbers afterwards."""
        return self._spikes is None or self.on_spike == REPORT

    @property
    def may_look_again(self) -> bool:
        """Whether steps may have to be computed again."""
        return self.how != IGNORE or self.on_spike == RERUN

    @property
    def looks_again(self) -> bool:
        """Whether a step that is not finite is computed again, to find out where that begins: not
        for each of several in a row."""
        return self.how != IGNORE and self._in_a_row == 0

    def refuse(
        self,
        step: int,
        norm: float,
        found: Found,
        layout: Layout,
        lr: float,
        precision: str,
        repeated: str = "",
    ) -> str:
        """Skip a step. Returns the warning to show.

        Args:
            step: number of the step, 1 for the first.
            norm: gradient norm.
            lr: learning rate of the step.
            repeated: what the second run of the step has shown, a sentence with a space before it.

        Raises:
            NonFiniteError: `how` is "stop", or too many steps in a row were skipped.
        """
        loss = "there is no loss" if self.loss is None else f"the loss is {self.loss:g}"
        what = (
            f"Step {step}: {loss} and the gradient norm is"
            f" {norm:g}{_where(found, layout)}.{repeated}"
        )
        if self.how == STOP:
            raise NonFiniteError(f"{what} {_before(step, found)} {_advice(lr, precision, found)}")
        self.skipped, self._in_a_row = self.skipped + 1, self._in_a_row + 1
        if self._in_a_row >= self._most_skipped:
            raise NonFiniteError(
                f"{what} {self._most_skipped} steps in a row were skipped."
                f" {_advice(lr, precision, found)}"
            )
        return f"{what} The optimizer skips this step (skipped so far: {self.skipped})."


def _where(found: Found, layout: Layout) -> str:
    """Name the ranks to look at, where these are fewer than all."""
    if 0 < len(found.data) < layout.dp:
        return f" (not finite on data-parallel {_ranks(found.data)} of {layout.dp})"
    if found.ranks and not found.data and len(found.ranks) < layout.world_size:
        return f" (gradients not finite on {_ranks(found.ranks)} of {layout.world_size})"
    return ""


def _ranks(numbers: tuple[int, ...]) -> str:
    shown = [
        *numbers[:_MOST_NAMED],
        *([f"{len(numbers) - _MOST_NAMED} more"] if len(numbers) > _MOST_NAMED else []),
    ]
    return f"rank{'s' * (len(numbers) > 1)} {listed(shown)}"


def _before(step: int, found: Found) -> str:
    """Describe the state of the weights."""
    if found.weights and not found.names:
        return "The weights have not been finite since an earlier step."
    if found.weights:
        more = len(found.names) - _MOST_NAMED
        names = listed([*found.names[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])])
        return (
            f"The weights of {names} are not finite, on {_ranks(found.weights)}: since an earlier"
            " step, or because the step or a hook wrote to them."
        )
    state = f"those after step {step - 1}" if step > 1 else "the initial ones"
    return f"The optimizer did not take this step: the weights are still {state}."


def _advice(lr: float, precision: str, found: Found) -> str:
    data = "" if found.weights else " Look at the data of this step."
    wider = " Try a wider precision than bf16." if "bf16" in precision or precision == "fp8" else ""
    return (
        f"Resume a checkpoint from before the loss rose, with a lower learning rate (now {lr:g}) or"
        f" a longer warm-up.{data}{wider} To skip such steps, set trainer.nonfinite=skip. To train"
        " on with them, set trainer.nonfinite=ignore. In a script, pass nonfinite=... to"
        " Lightning3DStrategy or Engine."
    )


def find_nonfinite(
    guard: StepGuard,
    gradients: Iterable[Tensor],
    weights: Sequence[tuple[str, Tensor]],
    layout: Layout,
    rank: int,
    device: torch.device,
) -> Found:
    """Find the ranks where values are not finite, by one all-reduce over the world, and the weights
    there, by a gather. Called only after a failed step.

    Args:
        gradients: this rank's part of the reduced gradients.
        weights: this rank's part of the weights, by name.
        rank: of this process.
    """
    import torch
    import torch.distributed as dist

    flags = torch.zeros(layout.world_size, 3, device=device)
    values = [value for _, value in weights]
    flags[rank] = torch.tensor(
        [
            float(flag)
            for flag in (guard.lost_here, not all_finite(gradients), not all_finite(values))
        ]
    )
    dist.all_reduce(flags)
    lost, ranks, bad = (
        [index for index, flag in enumerate(column) if flag] for column in flags.T.tolist()
    )
    names: list[list[str]] = [[]] * layout.world_size
    if bad:
        dist.all_gather_object(names, [name for name, value in weights if not all_finite([value])])
    every = tuple(dict.fromkeys(name for own in names for name in own))
    return Found(
        tuple(sorted({layout.coordinates(one)["dp"] for one in lost})),
        tuple(ranks),
        tuple(bad),
        every,
    )


def trained_weights(module: nn.Module, backend: DataParallelBackend) -> list[tuple[str, Tensor]]:
    """Collect this rank's part of the weights that are trained, by name."""
    trained = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    if shards := backend.weight_shards():
        values = (
            (shard.name, value)
            for shard in shards
            if shard.name in trained
            for value in shard.values.values()
        )
        return [(name, value) for name, value in values if not isinstance(value, (int, float))]
    return list(trained.items())


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether every element of all tensors is finite. Waits for the device once."""
    import torch

    flags = [torch.isfinite(tensor).all() for tensor in tensors if tensor.is_floating_point()]
    return not flags or bool(torch.stack(flags).all())


def require_finite_weights(weights: Iterable[Tensor], device: torch.device, path: object) -> None:
    """Refuse to write a checkpoint of weights that are not finite. One all-reduce of a number over
    all ranks.

    Raises:
        NonFiniteError: on every rank.
    """
    import torch
    import torch.distributed as dist

    bad = torch.tensor(int(not all_finite(weights)), device=device)
    if dist.is_initialized():
        dist.all_reduce(bad)
    if bad.item():
        raise NonFiniteError(
            f"The checkpoint {path} was not written: the weights are not finite after the last"
            " optimizer step. Resume an earlier checkpoint, with a lower learning rate or a longer"
            " warm-up. To write it anyway, set trainer.nonfinite=ignore (in a script:"
            ' Lightning3DStrategy(nonfinite="ignore")).'
        )
