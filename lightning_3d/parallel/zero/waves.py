"""The waves of a step: gradients that are complete together, in the order in which all ranks send
them.

    wave              complete when                                          its gradients
    early             the last backward of a stage has passed them           as many as fit in a bucket, from the end of the model
    end of a stage    the last backward of the stage is over                 the others of the stage
    end of the step   the last backward is over, and tied copies are summed  of parameters that another pipeline rank has a copy of

The order follows the order of the parameters in the model, not the one in which gradients arrive in
a first step: a sum over more than two ranks depends on the place of an element in its message, and
a run that goes on from a checkpoint must add up in the same order.
"""  # noqa: E501

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.zero.gradient_buffers import sum_dtype


@dataclass(frozen=True, eq=False)
class Wave:
    """Parameters whose gradients are sent together.

    Attributes:
        stage: index, among this rank's stages, of the one whose last backward completes them; None:
            the end of the step.
        parameters: the parameters; empty if nothing is trained there.
        is_early: whether they may be complete before that backward is over.
    """

    stage: int | None
    parameters: Sequence[nn.Parameter]
    is_early: bool = False


def find_waves(
    stages: Sequence[Sequence[nn.Parameter]],
    trained: Iterable[nn.Parameter],
    *,
    late: Callable[[nn.Parameter], bool],
    early: Callable[[nn.Parameter], bool],
    early_bytes: int | None,
) -> list[Wave]:
    """Number the waves of a rank.

    The backward reaches the last stage first. A parameter that two stages use is complete after the
    backward of the earlier one.

    Args:
        stages: for each stage its parameters, in the order in which the forward uses them.
        trained: parameters that are trained.
        late: whether a parameter is complete only at the end of the step.
        early: whether a parameter's gradient may be sent inside a backward.
        early_bytes: bytes of the gradients of one early wave, except for a single larger parameter.
            A stage with less than that has none. None: there are none.
    """
    trained = list(trained)
    at_end = {id(parameter): parameter for parameter in trained if late(parameter)}
    left = {id(parameter): parameter for parameter in trained if id(parameter) not in at_end}
    uses = Counter(key for stage in stages for key in {id(parameter) for parameter in stage})
    waves = []
    for stage in reversed(range(len(stages))):
        # A tied parameter is in the list twice, and complete when the backward has passed its first
        # use.
        members = list(
            {
                id(parameter): parameter for parameter in stages[stage] if id(parameter) in left
            }.values()
        )
        if any(uses[id(parameter)] > 1 for parameter in members):
            earlier = {id(parameter) for other in stages[:stage] for parameter in other}
            members = [parameter for parameter in members if id(parameter) not in earlier]
        chosen = [
            parameter for parameter in members if uses[id(parameter)] == 1 and early(parameter)
        ]
        found = [] if early_bytes is None else _full_buckets(reversed(chosen), early_bytes)
        sent = {id(parameter) for bucket in found for parameter in bucket}
        waves += [Wave(stage, bucket, is_early=True) for bucket in found]
        waves.append(Wave(stage, [parameter for parameter in members if id(parameter) not in sent]))
        for parameter in members:
            del left[id(parameter)]
    return [*waves, Wave(None, [*at_end.values(), *left.values()])]


def _full_buckets(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Split parameters into runs of at most `limit` bytes of gradients, each type apart, without
    the last run of each type."""
    full: list[list[nn.Parameter]] = []
    running: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        dtype = sum_dtype(parameter)
        run, size = running.get(dtype, ([], 0))
        added = parameter.numel() * dtype.itemsize
        if run and size + added > limit:
            full.append(run)
            run, size = [], 0
        running[dtype] = ([*run, parameter], size + added)
    return full


def require_same_order(names: Sequence[str], group: dist.ProcessGroup) -> None:
    """Refuse parameters whose order differs between the ranks of `group`: gradients of different
    ones would be added up. One small all-reduce in host memory.

    Raises:
        ConfigError: the orders differ.
    """
    own = _fingerprint(names)
    least_and_most = torch.tensor([own, -own])
    dist.all_reduce(least_and_most, dist.ReduceOp.MIN, group=group)
    if least_and_most.tolist() != [own, -own]:
        raise ConfigError(
            "The parameters of the model (with ZeRO, of its optimizer) have another order on other"
            " data-parallel ranks, so gradients of different parameters would be added up. Create"
            " layers and parameter groups in one fixed order: from a list, for example, not from a"
            " set."
        )


def _fingerprint(names: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7], "big")


class Arrivals:
    """Listens to autograd during the last backward of each stage, and tells which early waves are
    complete.

    A parameter that several segments of a reentrant checkpoint use gets several gradients in one
    backward, so that its first one is not its last. In the first step nothing is early, and if any
    rank of the group sees such a parameter, nothing ever is.

    Args:
        waves: all waves of the rank.
        control: the data-parallel ranks, for tensors in host memory.
        arrived: function that is called with a parameter whose gradient is complete, and the number
            of its wave.
    """

    def __init__(
        self,
        waves: Sequence[Wave],
        control: dist.ProcessGroup,
        arrived: Callable[[nn.Parameter, int], None],
    ) -> None:
        early = [(number, wave) for number, wave in enumerate(waves) if wave.is_early]
        self._number = {
            id(parameter): number for number, wave in early for parameter in wave.parameters
        }
        self._stage_of = {number: wave.stage for number, wave in early}
        self._of_wave = {
            number: {id(parameter) for parameter in wave.parameters} for number, wave in early
        }
        self._missing: dict[int, set[int]] = {}
        self._control, self._tell = control, arrived
        self._stage: int | None = None
        self._trial: Counter[int] = Counter()
        self._most = 0
        self._watched = False
        self._state = "first step" if early else "off"
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._arrived)
            for _, wave in early
            for p in wave.parameters
        ]

    def begin(self) -> None:
        """Start an optimizer step."""
        self._stage = None
        self._missing = {number: set(members) for number, members in self._of_wave.items()}

    def watch(self, stage: int | None) -> None:
        """The last backward of a stage begins; None: it is over."""
        self._stage = stage
        self._watched |= stage is not None
        self._trial.clear()

    @property
    def in_first_step(self) -> bool:
        """True until a step has shown how often gradients arrive."""
        return self._state == "first step"

    def are_complete(self, number: int) -> bool:
        """Return whether all gradients of an early wave have arrived; False for another wave."""
        return self._state == "on" and number in self._missing and not self._missing[number]

    def finish_step(self) -> None:
        """The backwards of the step are over. One small all-reduce in the first step."""
        if not self.in_first_step or not self._watched:
            return
        most = torch.tensor(self._most)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._control)
        self._state = "on" if most.item() <= 1 else "off"
        if self._state == "off":
            self.close()

    def _arrived(self, parameter: Tensor) -> None:
        number = self._number[id(parameter)]
        if self._stage is None or self._stage != self._stage_of[number]:
            return  # not the last backward of the stage, or one outside of a training step
        if self.in_first_step:
            self._trial[id(parameter)] += 1
            self._most = max(self._most, self._trial[id(parameter)])
            return
        if id(parameter) not in self._missing[number]:
            raise RuntimeError(
                f"A parameter of shape {tuple(parameter.shape)} got a second gradient in one"
                " backward after its gradient was sent to other ranks. In the first step it got"
                " one. Use the same activation checkpointing in all steps, and"
                " use_reentrant=False."
            )
        self._missing[number].discard(id(parameter))
        assert isinstance(parameter, nn.Parameter)
        self._tell(parameter, number)

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
