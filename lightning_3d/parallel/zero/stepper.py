"""The interface to the optimizer of a rank: what it trains, how it steps, and its state for
checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_3d.compat.torch_fake import is_fake
from lightning_3d.errors import CheckpointError, ConfigError, listed
from lightning_3d.options.optimizer import has_few_bits
from lightning_3d.parallel.sharding import OptimizerShard, ShardSpec
from lightning_3d.parallel.trials.optimizers import another_optimizer, options_of
from lightning_3d.parallel.zero.gradients import LOW_PRECISION, GradientSums, global_norm
from lightning_3d.parallel.zero.matrices import (
    HeldPiece,
    MatrixExchange,
    pieces_of,
    pretended_table,
)
from lightning_3d.parallel.zero.muon import MuonWithAdamW
from lightning_3d.parallel.zero.trained import (
    Trained,
    TrainedParameters,
    Writes,
    differs,
    merged,
    with_writes,
)


class Stepper(ABC):
    """Steps what this rank's optimizer trains, with gradients that are reduced.

    Every method is local, except `gradient_norm`, `step` and `publish`, which all ranks call.
    """

    @abstractmethod
    def follow_writes(self, *, unseen: bool = False) -> None:
        """Copy what something else wrote into parameters (see `Writes`) into the master weights.

        Args:
            unseen: also what was written through `.data`: all values are compared.
        """

    @abstractmethod
    def unseen_writes(self) -> list[tuple[str, Tensor]]:
        """Compare all master weights with their parameters: (name, True on the device if they
        differ), where no write was seen."""

    # Only separate master weights have gradients of their own.
    def take_gradients(self) -> None:  # noqa: B027
        """Give the optimizer's tensors their gradients, after the reduction."""

    @abstractmethod
    def gradients(self) -> Iterator[Tensor]:
        """The reduced gradients that this rank's optimizer steps with."""

    @abstractmethod
    def gradient_pieces(self) -> Iterator[tuple[Trained, int | None, Tensor | None]]:
        """The same gradients, each with its parameter, and the element of the flattened parameter
        that it begins with; None if it is the whole gradient. None for a gradient where none
        arrived."""

    def gradients_by_parameter(self) -> Iterator[tuple[ShardSpec, Tensor | None]]:
        """The same gradients, each with the place of its parameter."""
        return ((entry.spec, gradient) for entry, _, gradient in self.gradient_pieces())

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """Norm of the reduced gradients of the whole model, on the device: one all-reduce."""

    @property
    @abstractmethod
    def can_skip(self) -> bool:
        """Whether `step` can take `skip`. Local."""

    @abstractmethod
    def step(self, without_gradient: Sequence[nn.Parameter], skip: Tensor | None = None) -> None:
        """Run the optimizer and bring the new weights to all ranks that use them. The gradients
        stay until `discard`.

        Args:
            without_gradient: parameters that no rank has a gradient for, which stay as they are.
            skip: 1.0 on the device (float32, shape ()) if weights and state are to stay as they
                are, else 0.0.
        """

    def discard(self) -> None:  # noqa: B027 - gradients may be in `GradientSums` alone
        """Drop the reduced gradients."""

    @abstractmethod
    def refresh_master_weights(self) -> None:
        """Copy the module's parameters, written from outside, into the master weights."""

    @abstractmethod
    def weights(self) -> list[OptimizerShard]:
        """The weights themselves that this rank's optimizer trains, master weights where there are
        any, under one key. Local."""

    @abstractmethod
    def publish(self) -> None:
        """Bring what was written into `weights` to all ranks that use them, as after a step.
        Collective over the data-parallel ranks."""

    @abstractmethod
    def create_state(self, state: Mapping[str, Mapping[str, Tensor | float]]) -> None:
        """See `DataParallelBackend.create_optimizer_state`."""

    @abstractmethod
    def shards(self, *, to_save: bool) -> list[OptimizerShard]:
        """See `DataParallelBackend.optimizer_shards`."""

    @abstractmethod
    def held(self) -> dict[str, list[Tensor]]:
        """See `DataParallelBackend.held`."""

    @abstractmethod
    def release(self) -> None:
        """Let go of the optimizer and all process groups."""


def new_state(
    template: Tensor | float, like: Tensor, full_shape: Sequence[int], group: Mapping[str, object]
) -> Tensor | float:
    """One state of `like`, a trained tensor that is a part of a parameter of shape `full_shape`.

    Args:
        template: see `DataParallelBackend.create_optimizer_state`.
        like: the trained tensor.
        full_shape: shape of the parameter in an unsharded model.
        group: the optimizer's parameter group; capturable and fused optimizers want their step
            count on the device.
    """
    if not isinstance(template, Tensor):
        return template
    if not template.is_meta:
        # its kernels want a step count of this type, whatever torch's default type is
        if group.get("fused"):
            return template.to(like.device, torch.float32)
        return template.to(like.device if group.get("capturable") else "cpu")
    shape = like.shape if tuple(template.shape) == tuple(full_shape) else template.shape
    dtype = like.dtype if template.is_floating_point() else template.dtype
    return torch.zeros(shape, dtype=dtype, device=like.device)


def start_state(optimizer: Optimizer) -> None:
    """Make the state that an optimizer makes when it is built, for the tensors that are in its
    groups now. Only Adagrad makes any."""
    if isinstance(optimizer, torch.optim.Adagrad):
        groups = [dict(group) for group in optimizer.param_groups]
        made = torch.optim.Adagrad(groups, **optimizer.defaults).state
        optimizer.state.clear()
        optimizer.state.update(made)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """All tensors that an optimizer keeps."""
    return [
        value
        for state in optimizer.state.values()
        for value in inner_states(state).values()
        if isinstance(value, Tensor)
    ]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer of torch leaves weights and state as they are where its `found_inf` is 1
    on the device.

    Its fused kernels do. The first step of SGD with momentum makes the momenta all the same.
    """
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    return type(optimizer) in kinds and all(
        group.get("fused") and not group.get("momentum") for group in optimizer.param_groups
    )


@contextmanager
def skipping(optimizer: Optimizer, skip: Tensor | None) -> Iterator[None]:
    """Context of a step of `optimizer` that the device may skip. `found_inf` is what
    `torch.amp.GradScaler` sets (torch 2.8 to 2.13)."""
    if skip is None:
        yield
        return
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


class PlainStepper(Stepper):
    """Keeps double precision. bf16 parameters have float32 master weights, which the optimizer
    trains.

    Args:
        trained: parameters of this rank.
        sums: their gradients, reduced in place.
        optimizer: the user's; its parameter groups get the master weights.
    """

    def __init__(
        self, trained: TrainedParameters, sums: GradientSums, optimizer: Optimizer
    ) -> None:
        self._trained, self._sums, self._optimizer = trained, sums, optimizer
        self._masters = {
            parameter: nn.Parameter(parameter.detach().to(torch.float32))
            for parameter in trained.parameters
            if parameter.dtype in LOW_PRECISION
        }
        if self._masters:
            swap_parameters(optimizer, self._masters)
        ranges = (
            TrainedRange(
                self._masters.get(entry.parameter, entry.parameter),
                0,
                entry,
                0,
                entry.parameter.numel(),
            )
            for entry in trained.entries
        )
        share_matrices(optimizer, trained, ranges, sharded=False)
        self._writes = Writes(self._masters)

    @torch.no_grad()
    def follow_writes(self, *, unseen: bool = False) -> None:
        for parameter, master in self._masters.items():
            if unseen or parameter in self._writes:
                master.copy_(merged(master, parameter))
        self._writes.ours()

    def unseen_writes(self) -> list[tuple[str, Tensor]]:
        names = {entry.parameter: entry.name for entry in self._trained.entries}
        return [
            (names[parameter], differs(master, parameter))
            for parameter, master in self._masters.items()
            if parameter not in self._writes
        ]

    def take_gradients(self) -> None:
        for parameter, master in self._masters.items():
            master.grad = self._sums[parameter]

    def gradients(self) -> Iterator[Tensor]:
        return self._sums.present()

    def gradient_pieces(self) -> Iterator[tuple[Trained, int | None, Tensor | None]]:
        return ((entry, None, self._sums[entry.parameter]) for entry in self._trained.entries)

    def gradient_norm(self) -> Tensor:
        counted = (
            entry.parameter for entry in self._trained.entries if self._trained.counts(entry)
        )
        gradients = (
            gradient for gradient in map(self._sums.__getitem__, counted) if gradient is not None
        )
        mesh = self._trained.mesh
        # Together these ranks count every element once: the data-parallel ranks all have the whole
        # gradient, except of experts.
        group = mesh.group("tp", "cp", "pp") if mesh.layout.ep == 1 else dist.group.WORLD
        return global_norm(gradients, self._trained.device, group)

    @property
    def can_skip(self) -> bool:
        return skips_on_device(self._optimizer)

    @torch.no_grad()
    def step(self, without_gradient: Sequence[nn.Parameter], skip: Tensor | None = None) -> None:
        step_matrices(self._optimizer, lambda tensor: tensor.grad)
        with skipping(self._optimizer, skip):
            self._optimizer.step()  # leaves parameters whose gradient is None as they are
        self.publish()

    def discard(self) -> None:
        for parameter, master in self._masters.items():
            # or the gradients of this step would stay in memory until the next one
            master.grad = self._sums[parameter] = None

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        for parameter, master in self._masters.items():
            master.copy_(parameter)
        self._writes.ours()

    def weights(self) -> list[OptimizerShard]:
        found = (
            (entry.name, self._masters.get(entry.parameter, entry.parameter))
            for entry in self._trained.entries
        )
        return [OptimizerShard(name, None, {"weight": weight}) for name, weight in found]

    @torch.no_grad()
    def publish(self) -> None:
        for parameter, master in self._masters.items():
            parameter.copy_(master)
        self._writes.ours()

    def create_state(self, state: Mapping[str, Mapping[str, Tensor | float]]) -> None:
        groups = {
            id(parameter): group
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        for entry in self._trained.entries:
            tensor = self._masters.get(entry.parameter, entry.parameter)
            self._optimizer.state.pop(tensor, None)
            if entry.name in state:
                group, shape, saved = groups[id(tensor)], entry.spec.global_shape, state[entry.name]
                wrapped = new_wrapped_states(self._optimizer, group, tensor, saved, entry.name)
                made = {
                    key: new_state(value, tensor, shape, group)
                    for key, value in saved.items()
                    if SEPARATOR not in key
                }
                self._optimizer.state[tensor] = made | wrapped

    def shards(self, *, to_save: bool) -> list[OptimizerShard]:
        shards = []
        for entry in self._trained.entries:
            master = self._masters.get(entry.parameter)
            state = self._optimizer.state.get(entry.parameter if master is None else master, {})
            values = {key: value for key, value in inner_states(state).items() if value is not None}
            if master is not None:
                values["master"] = with_writes(master, entry.parameter) if to_save else master
            shards.append(OptimizerShard(entry.name, None, values))
        return shards

    def held(self) -> dict[str, list[Tensor]]:
        return {
            "parameters": [],
            "gradients": [],
            "optimizer": [*state_tensors(self._optimizer), *self._masters.values()],
        }

    def release(self) -> None:
        self._masters = {}
        self._writes = Writes([])


def swap_parameters(optimizer: Optimizer, masters: dict[nn.Parameter, nn.Parameter]) -> None:
    """Let `optimizer` train the master of each parameter that has one. Existing state moves along,
    in float32."""
    for group in optimizer.param_groups:
        group["params"] = [masters.get(parameter, parameter) for parameter in group["params"]]
    for parameter, master in masters.items():
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[master] = {
                key: (
                    value.to(torch.float32)
                    if isinstance(value, Tensor) and value.is_floating_point()
                    else value
                )
                for key, value in state.items()
            }


AXES = ("tp", "cp", "dp")
"""Ranks along these axes share the matrices of a stage."""


@dataclass(frozen=True)
class TrainedRange:
    """A range of a local parameter in a tensor that the optimizer trains.

    Attributes:
        tensor: the tensor.
        offset: first element of the range in the flattened tensor.
        entry: the parameter.
        first: first element of the range in the flattened parameter.
        numel: number of elements.
    """

    tensor: Tensor
    offset: int
    entry: Trained
    first: int
    numel: int


def share_matrices(
    optimizer: Optimizer,
    trained: TrainedParameters,
    ranges: Iterable[TrainedRange],
    *,
    sharded: bool,
) -> None:
    """Plan how the ranks of each stage step matrices. Collective over the world; does nothing for
    other optimizers than Muon.

    Args:
        optimizer: its groups have the tensors of `ranges`.
        trained: parameters of this rank.
        ranges: what this rank trains of them.
        sharded: whether ZeRO shards the optimizer's state.

    Raises:
        ConfigError: a parameter that is not contiguous.
    """
    if not isinstance(optimizer, MuonWithAdamW):
        return
    members = {id(tensor) for group in optimizer.matrix_groups for tensor in group["params"]}
    held: list[HeldPiece] = []
    for each in ranges:
        if id(each.tensor) not in members:
            continue
        if not each.tensor.is_contiguous():
            raise ConfigError(
                f"Muon needs parameters that are contiguous in memory, but '{each.entry.name}' is"
                " not. Use .contiguous()."
            )
        held += pieces_of(each.tensor, each.offset, each.entry.spec, each.first, each.numel)
    mesh = trained.mesh
    mesh.create(mesh.layout.groups(*AXES))
    group = mesh.group_for(mesh.ranks(*AXES))
    table = None
    if any(is_fake(parameter) for parameter in trained.parameters):
        table = pretended_table(
            [each.piece for each in held],
            dist.get_world_size(group),
            dist.get_rank(group),
            sharded=sharded,
        )
    optimizer.share_matrices(MatrixExchange(held, group, trained.device, table))


def step_matrices(optimizer: Optimizer, gradient_of: Callable[[Tensor], Tensor | None]) -> None:
    """Step the matrices of Muon, before the optimizer's own step. Does nothing for other
    optimizers. All ranks of a stage call it."""
    if isinstance(optimizer, MuonWithAdamW):
        optimizer.step_matrices(gradient_of)


SEPARATOR = ":"
"""Between the key of a state and the name of an inner tensor. Names of parameters, which
checkpoints put before keys, may have dots."""


def inner_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each state that wraps others by its inner tensors: the tensors themselves, without
    copies."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            found.update(
                inner_states({f"{key}{SEPARATOR}{name}": getattr(value, name) for name in names})
            )
        else:
            found[key] = value
    return found


def state_without_values(
    optimizer: Optimizer, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype
) -> dict[str, Any]:
    """Make the state that an optimizer makes for a parameter in its first step, on the meta device.

    Another optimizer of the same class takes the step. Not compiled: torchao compiles its step for
    each shape.

    Args:
        optimizer: is not changed.
        group: its parameter group that the parameter is in.
        shape: shape of the parameter.
        dtype: type of the parameter.
    """
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    probe = another_optimizer(optimizer, options_of(group), parameter)
    with torch.compiler.set_stance("force_eager"):
        probe.step()
    return dict(probe.state[parameter])


def new_wrapped_states(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    like: Tensor,
    saved: Mapping[str, Tensor | float],
    name: str,
) -> dict[str, Tensor]:
    """Make those states of a parameter that wrap others, of zeros that a checkpoint then fills.

    Args:
        optimizer: the optimizer that will have them.
        group: its parameter group that the parameter is in.
        like: the parameter, or its master weights.
        saved: states in the checkpoint, by the keys of `inner_states`.
        name: name of the parameter, for messages.

    Raises:
        CheckpointError: the checkpoint has other states: of another optimizer, or with other
            blocks.
    """
    kind = type(optimizer)
    if not has_few_bits(f"{kind.__module__}.{kind.__name__}") and not any(
        SEPARATOR in key for key in saved
    ):
        return {}
    states = state_without_values(optimizer, group, like.shape, like.dtype)
    own, there = (_shapes(of) for of in (inner_states(states), saved))
    if own != there:
        raise CheckpointError(
            f"The optimizer state of '{name}' in the checkpoint is {_listed(there)}, but"
            f" {kind.__name__} has {_listed(own)} here. To resume, use the optimizer and the"
            " block_size of the run that saved the checkpoint."
        )
    return {
        key: _zeros(value, like.device)
        for key, value in states.items()
        if is_traceable_wrapper_subclass(value)
    }


def _shapes(states: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in states.items() if isinstance(value, Tensor)}


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return listed(f"{key} {shape}" for key, shape in sorted(shapes.items()))


def _zeros(value: Any, device: torch.device) -> Any:
    """Make a tensor of zeros of the same kind, shape and type."""
    if not is_traceable_wrapper_subclass(value):
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    names, context = value.__tensor_flatten__()
    inner: dict[str, Any] = {name: _zeros(getattr(value, name), device) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())
