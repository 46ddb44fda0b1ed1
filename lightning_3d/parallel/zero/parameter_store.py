"""Stores of parameters: whole on every data-parallel rank (stages 0 to 2), or sharded over them
(stage 3)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.options.zero import PARAMETERS, STEP, ZeroOptions
from lightning_3d.parallel import gloo_exchange as exchange
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.sharding import OptimizerShard, ShardSpec
from lightning_3d.parallel.zero.deepspeed_engine import Partition
from lightning_3d.parallel.zero.gradients import Share, Slot
from lightning_3d.parallel.zero.parameter_units import ParameterUnits
from lightning_3d.parallel.zero.trained import Trained, TrainedParameters, expert_shard_group


@dataclass(frozen=True)
class TrainedTensor:
    """Tensor of a parameter that the optimizer of this rank trains.

    Attributes:
        entry: the parameter.
        tensor: the parameter itself, or this rank's part of it, flattened.
        first: element of the flattened parameter that `tensor` begins with.
    """

    entry: Trained
    tensor: nn.Parameter
    first: int = 0


class ParameterStore(ABC):
    """Keeps the values of a rank's parameters. Its methods are those of `DataParallelBackend` by
    the same names, which explains them."""

    @abstractmethod
    def shard(
        self,
        module: nn.Module,
        models: Sequence[Sequence[nn.Module]],
        device: torch.device,
        is_active: Callable[[nn.Module], bool],
    ) -> None: ...

    @abstractmethod
    def parameters_in_use(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def weight_shards(self) -> list[OptimizerShard]: ...

    @abstractmethod
    def make_whole(self) -> None: ...

    @abstractmethod
    def abandon(self) -> bool: ...

    @abstractmethod
    def tensors_to_train(self, trained: TrainedParameters) -> list[TrainedTensor]:
        """Tensors that this rank's optimizer trains. Called once, by
        `DataParallelBackend.prepare`."""

    @abstractmethod
    def before_gradients_are_taken(self) -> None:
        """Refuse gradients that were computed from missing parameters. Called after a backward
        action, before its gradients are reduced."""

    @abstractmethod
    def after_backward(self) -> None:
        """Free parameters after a backward action and the reduction of its gradients."""

    @abstractmethod
    def held(self) -> list[Tensor]:
        """Tensors that are kept of parameters apart from the module's own."""


class WholeParameters(ParameterStore):
    """Every data-parallel rank keeps all parameters (stages 0 to 2)."""

    def shard(
        self,
        module: nn.Module,
        models: Sequence[Sequence[nn.Module]],
        device: torch.device,
        is_active: Callable[[nn.Module], bool],
    ) -> None:
        """Do nothing: parameters are not sharded."""

    def parameters_in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def weight_shards(self) -> list[OptimizerShard]:
        return []

    def make_whole(self) -> None:
        """Do nothing: parameters are whole already."""

    def abandon(self) -> bool:
        return False

    def tensors_to_train(self, trained: TrainedParameters) -> list[TrainedTensor]:
        return [TrainedTensor(entry, entry.parameter) for entry in trained.entries]

    def before_gradients_are_taken(self) -> None:
        """Do nothing: no parameter is ever missing."""

    def after_backward(self) -> None:
        """Do nothing: there is nothing to free."""

    def held(self) -> list[Tensor]:
        return []


_PATIENCE = 5.0
"""Seconds that a failed rank waits for messages that other ranks have sent already."""

_PROPERTIES = (
    *(
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "itemsize",
        "nbytes",
        "requires_grad",
        "grad",
        "grad_fn",
        "is_leaf",
    ),
    *(
        "is_meta",
        "is_cpu",
        "is_cuda",
        "is_sparse",
        "_version",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
    ),
)

_METHODS = (
    *(
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "storage_offset",
        "is_floating_point",
        "is_complex",
    ),
    *(
        "is_contiguous",
        "is_inference",
        "get_device",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "__len__",
    ),
)

_WITHOUT_VALUES = {getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)}
_WITHOUT_VALUES |= {
    getattr(getattr(Tensor, name), access)
    for name in _PROPERTIES
    for access in ("__get__", "__set__", "__delete__")
    if hasattr(getattr(Tensor, name, None), access)
}
"""Functions on tensors that neither read nor write values."""


class AwaitedParameter(nn.Parameter):
    """Class of a parameter whose new value has not arrived: the first operation on it waits, and
    makes it an `nn.Parameter` again.

    torch changes the class of its lazy parameters in the same way
    (`torch.nn.parameter.UninitializedParameter.materialize`).
    """

    _gather: OverlappedGather

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for tensor in tensors_of((args, kwargs)):
            _wait_for(tensor)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(_wait_for(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _wait_for(self).__reduce_ex__(protocol)


def _wait_for(tensor: Tensor) -> Tensor:
    """Wait for the value of a tensor, if it is awaited. Returns it."""
    if type(tensor) is AwaitedParameter:
        tensor._gather.wait_for([tensor])
    return tensor


class _Message:
    """One broadcast: elements of a flat buffer that one rank has stepped, and the parameters that
    they are a part of."""

    def __init__(
        self,
        elements: Tensor,
        source: int,
        group: dist.ProcessGroup,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.parameters = parameters
        self._elements, self._source, self._group = elements, source, group
        self._work: Any = None
        self._stream: torch.cuda.Stream | None = None

    def start(self) -> None:
        if self._elements.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._elements.device)
        self._work = exchange.start_broadcast(self._elements, self._source, self._group)

    def wait(self) -> None:
        """Make the current stream wait, and the one that trains: later reads on any stream follow
        one of them."""
        if self._work is None:
            return
        self._work.wait()
        if self._stream is not None and self._stream != torch.cuda.current_stream(
            self._elements.device
        ):
            with torch.cuda.stream(self._stream):
                self._work.wait()
        self._work = None

    def has_arrived(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()


class OverlappedGather:
    """Broadcasts of what each data-parallel rank has stepped, all under way together.

    Args:
        message_bytes: upper bound of the bytes of one message.
    """

    def __init__(self, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._messages: list[_Message] = []
        self._awaited: dict[nn.Parameter, list[_Message]] = {}

    def connect(self, partitions: Iterable[Partition], trained: TrainedParameters) -> None:
        """Plan the messages, in one order on all ranks that share them: that in which the forward
        uses their parameters."""
        order = {
            id(parameter): place
            for place, parameter in enumerate(p for stage in trained.stages for p in stage)
        }
        found = [
            message
            for partition in partitions
            for message in _messages(
                partition,
                trained.expert_shard_group if partition.experts else trained.shard_group,
                self._message_bytes,
            )
        ]
        self._messages = sorted(
            found,
            key=lambda message: min(
                order.get(id(parameter), 0) for parameter in message.parameters
            ),
        )

    def start(self) -> None:
        """Start all broadcasts, after the optimizer's step. Collective."""
        for message in self._messages:
            message.start()
            for parameter in message.parameters:
                self._awaited.setdefault(parameter, []).append(message)
        for parameter in list(self._awaited):
            if type(parameter) is nn.Parameter:
                parameter._gather = self  # type: ignore[attr-defined]
                parameter.__class__ = AwaitedParameter
            else:  # a class of the user's, or without values
                self.wait_for([parameter])

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for the new values of some parameters. Local, like everything that follows."""
        if not self._awaited:
            return
        for parameter in parameters:
            for message in self._awaited.get(parameter, ()):
                message.wait()
            self._forget(parameter)

    def settle(self) -> None:
        """Wait for everything that is under way."""
        self.wait_for(list(self._awaited))

    def abandon(self) -> bool:
        """Wait a few seconds at most, because other ranks may be gone. Returns whether parameters
        stay without their new values."""
        deadline = time.monotonic() + _PATIENCE
        messages = {
            id(message): message for awaited in self._awaited.values() for message in awaited
        }.values()
        while (
            not (arrived := all(message.has_arrived() for message in messages))
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        try:
            if arrived:
                self.settle()
        except RuntimeError:  # of a message whose sender is gone
            arrived = False
        for parameter in list(self._awaited):
            self._forget(parameter)
        return not arrived

    def release(self) -> None:
        """Let go of the buffers and the process groups."""
        self._messages = []

    def _forget(self, parameter: nn.Parameter) -> None:
        self._awaited.pop(parameter, None)
        if type(parameter) is AwaitedParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            del parameter._gather


class GatheredParameters(WholeParameters):
    """Every data-parallel rank keeps all parameters; after a step they arrive while the next
    forward runs.

    Attributes:
        gather: brings the new values.
    """

    def __init__(self, message_bytes: int) -> None:
        self.gather = OverlappedGather(message_bytes)
        self._hooks: list[Any] = []

    def shard(
        self,
        module: nn.Module,
        models: Sequence[Sequence[nn.Module]],
        device: torch.device,
        is_active: Callable[[nn.Module], bool],
    ) -> None:
        """Wait before each block for its parameters, and before each module outside the blocks for
        its own. Shards nothing.

        There is no hook inside a block: it would become a part of a compiled one, and operations in
        it wait anyway.
        """
        if self._hooks:
            return
        blocks = [block for model in models for block in model]
        inside = {id(inner) for block in blocks for inner in block.modules()}
        for block in blocks:
            self._hook(block, block.parameters, is_active)
        for outer in module.modules():
            if id(outer) not in inside and next(outer.parameters(recurse=False), None) is not None:
                self._hook(outer, partial(outer.parameters, recurse=False), lambda outer: True)

    def _hook(
        self,
        module: nn.Module,
        parameters: Callable[[], Iterable[nn.Parameter]],
        is_active: Callable[[nn.Module], bool],
    ) -> None:
        def before_forward(module: nn.Module, args: Any) -> None:
            if is_active(module):
                self.gather.wait_for(parameters())

        self._hooks.append(module.register_forward_pre_hook(before_forward, prepend=True))

    @contextmanager
    def parameters_in_use(self) -> Iterator[None]:
        yield
        self.gather.settle()  # parameters that the batch did not use

    def make_whole(self) -> None:
        self.gather.settle()
        self._close()

    def abandon(self) -> bool:
        self._close()
        return self.gather.abandon()

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _messages(
    partition: Partition, group: dist.ProcessGroup, message_bytes: int
) -> Iterator[_Message]:
    """Messages of one buffer, part by part. What only fills up a part is not sent."""
    flat, size = partition.group.flat, partition.group.owned.numel()
    limit = max(1, message_bytes // flat.element_size())
    ranks = dist.get_process_group_ranks(group)
    for index, source in enumerate(ranks if len(ranks) > 1 else ()):
        end = (index + 1) * size
        for start in range(index * size, end, limit):
            stop = min(start + limit, end)
            inside = [
                slot.parameter
                for slot in partition.slots
                if slot.start < stop and slot.stop > start
            ]
            if inside:
                yield _Message(flat[start:stop], source, group, inside)


class ShardedParameters(ParameterStore):
    """Parameters are whole only while a batch, or with `gather="micro_batch"` a block, is computed;
    those of frozen models as `gather_frozen` says.

    Args:
        mesh: process groups.
        specs: where each trained parameter lies in the whole model, by its name in the module.
        zero: resolved options.

    Attributes:
        on_block_finished: called with the parameters of a block whose backward is over, at the same
            point on all ranks.
    """

    def __init__(self, mesh: Mesh, specs: Mapping[str, ShardSpec], zero: ZeroOptions) -> None:
        self._mesh, self._specs, self._zero = mesh, specs, zero
        self._units: ParameterUnits | None = None
        self._names: dict[int, str] = {}
        self.on_block_finished: Callable[[list[nn.Parameter]], None] | None = None

    def shard(
        self,
        module: nn.Module,
        models: Sequence[Sequence[nn.Module]],
        device: torch.device,
        is_active: Callable[[nn.Module], bool],
    ) -> None:
        if self._units is not None:  # an earlier fit failed
            self._units.open()
            return
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        experts = {name for name, spec in self._specs.items() if spec.expert}
        self._units = ParameterUnits(
            module,
            models,
            self._mesh.shard_group,
            self._mesh.data_control,
            device,
            whole=self._zero.gather == STEP,
            whole_frozen=(self._zero.gather_frozen or self._zero.gather) == STEP,
            is_active=is_active,
            finished=self._block_finished,
            on_host=self._zero.offload == PARAMETERS,
            apart={
                key: expert_shard_group(self._mesh)
                for key, name in self._names.items()
                if name in experts
            },
        )

    def _block_finished(self, parameters: list[nn.Parameter]) -> None:
        if self.on_block_finished is not None:
            self.on_block_finished(parameters)

    @property
    def units(self) -> ParameterUnits:
        assert self._units is not None, "shard() comes first"
        return self._units

    @contextmanager
    def parameters_in_use(self) -> Iterator[None]:
        with self.units.in_use():
            yield

    def weight_shards(self) -> list[OptimizerShard]:
        if self._units is None:
            return []
        shards = []
        for unit in self._units.all:
            owned = {id(slot.parameter): first for slot, first, _ in unit.owned()}
            for slot in unit.slots:
                piece = unit.pieces.get(slot.parameter)
                values = piece.detach() if piece is not None else slot.parameter.new_zeros(0)
                shards.append(
                    OptimizerShard(
                        self._names[id(slot.parameter)],
                        owned.get(id(slot.parameter), 0),
                        {"weight": values},
                    )
                )
        return shards

    def make_whole(self) -> None:
        if self._units is not None:
            self._units.restore()
            self._units = None

    def abandon(self) -> bool:
        if self._units is None:
            return False
        if all(dist.get_world_size(unit.group) == 1 for unit in self._units.all):
            self.make_whole()
            return False
        self._units.close()
        return True

    def tensors_to_train(self, trained: TrainedParameters) -> list[TrainedTensor]:
        entries = {id(entry.parameter): entry for entry in trained.entries}
        found = []
        for unit in self.units.all:
            for slot, first, _ in unit.owned():
                if id(slot.parameter) in entries:
                    piece = nn.Parameter(unit.pieces[slot.parameter])
                    unit.pieces[slot.parameter] = piece
                    found.append(TrainedTensor(entries[id(slot.parameter)], piece, first))
        return found

    def in_unit_order(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Some parameters in the order in which the units have them."""
        chosen = {id(parameter) for parameter in parameters}
        return [
            slot.parameter
            for unit in self.units.all
            for slot in unit.slots
            if id(slot.parameter) in chosen
        ]

    def shares(self, slots: Sequence[Slot]) -> list[Share]:
        """Elements that each rank of the shard group keeps of a buffer in which parameters have
        these slots."""
        group = self._mesh.shard_group
        places = {id(slot.parameter): slot for slot in slots}
        return [
            Share(
                rank,
                places[id(slot.parameter)].start + first,
                places[id(slot.parameter)].start + last,
            )
            for rank in range(dist.get_world_size(group))
            for unit in self.units.all
            if unit.group == group
            for slot, first, last in unit.owned(rank)
            if id(slot.parameter) in places
        ]

    def before_gradients_are_taken(self) -> None:
        if self._units is not None:
            self._units.require_gathered_again()

    def after_backward(self) -> None:
        if self._units is not None:
            self._units.after_backward()

    def held(self) -> list[Tensor]:
        return [
            tensor
            for unit in (self._units.all if self._units is not None else ())
            for tensor in unit.kept()
        ]
