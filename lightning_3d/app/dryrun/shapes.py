"""Run a rank without memory and without other ranks: tensors have a shape but no values, and
process groups send nothing.

Small tensors that control decisions (token ids, counts, flags) stay real, so that decisions are
those of a real run. Results computed from fake tensors have no values: a program that reads one
gets 1 or True.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.app.dryrun.meter import Meter
from lightning_3d.compat.torch_fake import (
    as_fake,
    can_be_remembered,
    data_dependent_errors,
    device_of_fake,
    fake_backend,
    fake_mode,
    is_fake,
)
from lightning_3d.engine.step.totals import BatchTotals

NEW, FEW, MANY = 16, 4096, 2**20
"""Most elements of a real tensor: of a new floating-point one, of one computed from real ones, and
of integers and flags."""


class ShapeMeter(Meter):
    """Meter under which new tensors are fake unless they are small."""

    def __init__(self) -> None:
        super().__init__()
        self._mode = fake_mode()
        self._cache = ShapeCache(self._mode)

    def fake(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Make a tensor without values."""
        with self._mode:
            return torch.empty(shape, dtype=dtype, device=device)

    def _is_counted(self, tensor: Tensor) -> bool:
        return is_fake(tensor) or not tensor.is_meta

    def materialize(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Replace all parameters and buffers of a module, on meta or in memory, by fake tensors.
        Tied ones stay tied."""
        made: dict[int, Any] = {}
        for owner in module.modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is None or is_fake(parameter):
                    continue
                if id(parameter) not in made:
                    kind = (
                        dtype
                        if dtype is not None and parameter.is_floating_point()
                        else parameter.dtype
                    )
                    value = nn.Parameter(
                        self.fake(parameter.shape, kind), requires_grad=parameter.requires_grad
                    )
                    vars(value).update(vars(parameter))
                    made[id(parameter)] = (parameter, value)
                setattr(owner, name, made[id(parameter)][1])
            for places in (owner._buffers, vars(owner)):
                for name, tensor in list(places.items()):
                    if isinstance(tensor, Tensor) and tensor.is_meta:
                        if id(tensor) not in made:
                            made[id(tensor)] = (tensor, self.fake(tensor.shape, tensor.dtype))
                        places[name] = made[id(tensor)][1]

    def execute(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._opname
        if name == "device" and func.namespace == "prim":
            return device_of_fake(args[0]) if is_fake(args[0]) else func(*args, **kwargs)
        tensors = list(tensors_in(args)) + list(tensors_in(kwargs.values()))
        fakes = sum(map(is_fake, tensors))
        if fakes:
            return self._on_fakes(func, name, args, kwargs, tensors, fakes)
        if any(tensor.is_meta for tensor in tensors) or func.namespace in (
            "c10d",
            "_c10d_functional",
        ):
            return func(*args, **kwargs)
        if _writes(func):  # to a real tensor, or to the storage of one
            return func(*args, **kwargs)
        if not tensors and torch.device(kwargs.get("device") or "cpu").type == "meta":
            return func(*args, **kwargs)
        try:
            with self._mode:
                result = func(*args, **kwargs)
        except data_dependent_errors():
            return func(*args, **kwargs)
        if all(_is_small(part, FEW if tensors else NEW) for part in tensors_in([result])):
            return func(*args, **kwargs)
        return result

    def _on_fakes(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        fakes: int,
    ) -> Any:
        if name == "_local_scalar_dense":
            return _assumed(args[0])
        if name == "equal":
            return True
        if (
            fakes < len(tensors)
            and _writes(func)
            and isinstance(args[0], Tensor)
            and not is_fake(args[0])
        ):
            if name == "copy_":
                with torch.no_grad():
                    args[0].fill_(1)  # its value is unknown
            return args[0]
        key = self._cache.key(func, args, kwargs)
        result = self._cache.recall(key, tensors)
        if result is None:
            with self._mode:
                result = _ask(func, name, args, kwargs)
            self._cache.note(key, tensors, result)
        return result


def _ask(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # without shape functions (torch 2.11 to 2.13); they only write into their arguments
    if name in ("_fused_sgd_", "_fused_adagrad_"):
        return None
    # fake tensors support bf16 only (torch 2.11 to 2.13)
    if name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
        return func(*(part.bfloat16() for part in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _is_small(tensor: Tensor, few: int) -> bool:
    return tensor.numel() <= (few if tensor.is_floating_point() else MANY)


def _writes(func: Any) -> bool:
    """Check whether an operator changes its first argument."""
    arguments = func._schema.arguments
    return (
        bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write
    )


def _assumed(tensor: Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


@dataclass
class FoundResult:
    """Facts, other than tensors, that ranks of a pipeline send each other; found by running the
    ranks one after the other.

    Attributes:
        objects: objects that a rank broadcast, in order, by its index in the pipeline.
        totals: numbers of a step that only the last stage has.
        known: called with "shape" when the first rank has broadcast the shape of messages, with
            "totals" when the last one has totals.
    """

    objects: dict[int, list[Any]] = field(default_factory=dict)
    totals: BatchTotals | None = None
    known: Callable[[str], None] = lambda what: None


@contextmanager
def alone(
    rank: int, world_size: int, pipeline: Sequence[int], found: FoundResult, *, gloo: bool
) -> Iterator[None]:
    """Create the process groups of one rank without any other rank: collectives return at once and
    send nothing.

    Args:
        rank: global rank.
        world_size: number of ranks.
        pipeline: global ranks of its pipeline.
        found: facts that they send each other.
        gloo: whether to behave as over gloo, on CPUs; otherwise as over NCCL.

    Raises:
        RuntimeError: this process already has process groups.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "A dry run needs a process without process groups, but this one has some. Run it in a"
            " new process."
        )
    backend, store = fake_backend(gloo)
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store)
    asked: dict[int, int] = {}
    broadcast = dist.broadcast_object_list

    def broadcast_objects(
        objects: list[Any], src: int | None = None, group: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        # to the whole world, where this rank's own objects are right
        if group is None or src not in pipeline:
            return
        index = pipeline.index(src)
        if src == rank:
            found.objects.setdefault(index, []).append(list(objects))
            if index == 0:
                found.known("shape")
        elif index in found.objects:
            number = asked[index] = asked.get(index, -1) + 1
            objects[:] = found.objects[index][min(number, len(found.objects[index]) - 1)]

    dist.broadcast_object_list = broadcast_objects  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.broadcast_object_list = broadcast
        dist.destroy_process_group()


# Cache of the results of operations on fake tensors, by shape.
# A training step repeats a few hundred operations tens of thousands of times, and computing the
# shape of a result with fake tensors takes much longer than a look-up. `lightning-3d dryrun
# model=llama3_1_8b cluster=h100_1x8 parallelism=tp4_pp2` (two ranks, 64 micro-batches of 4096
# tokens) takes 22.5 s of CPU with the cache and 49.2 s without it (torch 2.13).


@dataclass(frozen=True)
class _MadeTensors:
    """Recipe to make a result again.

    Attributes:
        source: index of the input tensor that the result is, or is a view of; None: it has its own
            memory.
        itself: whether the result is that input tensor.
        shape: shape of the result.
        stride: strides of the result.
        offset: elements of the storage from the start of the input to the start of the result.
        dtype: type of the result.
        device: device of the result.
    """

    source: int | None
    itself: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def make(self, tensors: Sequence[Tensor], mode: Any) -> Tensor:
        if self.source is not None and self.itself:
            return tensors[self.source]
        if self.source is None:
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=self.dtype, device="meta")
            source = tensors[self.source]
            meta.set_(
                source.untyped_storage(),
                source.storage_offset() + self.offset,
                self.shape,
                self.stride,
            )
        return as_fake(meta, mode, self.device)


class ShapeCache:
    """Results of operations on fake tensors.

    Args:
        mode: mode of the fake tensors.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._known: dict[Hashable, tuple[type, list[_MadeTensors]]] = {}
        self._can: dict[Any, bool] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        """Return everything that the shapes of the results depend on; None if that is not known."""
        can = self._can.get(func)
        if can is None:
            can = self._can[func] = can_be_remembered(func)
        if not can:
            return None
        key = (
            func,
            torch.get_default_dtype(),
            _described(args),
            _described(kwargs.items()) if kwargs else None,
        )
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def recall(self, key: Hashable | None, tensors: Sequence[Tensor]) -> Any:
        """Make the result of a known operation again; None if it is not known."""
        found = self._known.get(key)
        if found is None:
            return None
        kind, parts = found
        made = [part.make(tensors, self._mode) for part in parts]
        return made[0] if kind is Tensor else kind(made)

    def note(self, key: Hashable | None, tensors: Sequence[Tensor], result: Any) -> None:
        """Store a result, if it can be made again from its shape."""
        if key is None:
            return
        parts = [result] if isinstance(result, Tensor) else result
        if not isinstance(parts, (list, tuple)) or not all(
            isinstance(part, Tensor) and is_fake(part) for part in parts
        ):
            return
        made = [_made(part, tensors) for part in parts]
        own = [
            part.untyped_storage()._cdata
            for part, how in zip(parts, made, strict=True)
            if how is not None and how.source is None
        ]
        if all(how is not None for how in made) and len(own) == len(set(own)):
            self._known[key] = (
                Tensor if isinstance(result, Tensor) else type(result),
                [how for how in made if how is not None],
            )


def _made(part: Tensor, tensors: Sequence[Tensor]) -> _MadeTensors | None:
    """Describe how to make a result again; None if its shape is not enough."""
    storage = part.untyped_storage()
    places = [
        place
        for place, tensor in enumerate(tensors)
        if is_fake(tensor) and tensor.untyped_storage()._cdata == storage._cdata
    ]
    same = [place for place in places if tensors[place] is part]
    shape, about = (tuple(part.shape), part.stride()), (part.dtype, device_of_fake(part))
    if same:
        return _MadeTensors(same[0], True, *shape, 0, *about)
    if places:
        source = tensors[places[0]]
        offset = int(part.storage_offset() - source.storage_offset())
        return (
            _MadeTensors(places[0], False, *shape, offset, *about)
            if len(places) == 1 and part.dtype == source.dtype
            else None
        )
    whole = torch.empty_strided(*shape, dtype=part.dtype, device="meta").untyped_storage().nbytes()
    return (
        _MadeTensors(None, False, *shape, 0, *about)
        if storage.nbytes() == whole and not part.storage_offset()
        else None
    )


def _described(values: Iterable[Any]) -> Hashable:
    return tuple([_one(value) for value in values])


def _one(value: Any) -> Any:
    if isinstance(value, Tensor):
        return is_fake(value), value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return _described(value)
    return type(value), value


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield all tensors, also those in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
