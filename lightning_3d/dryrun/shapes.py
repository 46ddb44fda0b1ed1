"""A rank without its memory and without other ranks: tensors that have a shape and no values, in process groups that send nothing.

Small tensors of numbers that decide what is done (token ids, counts, flags) stay real, so that decisions are those of a run. What is
computed from fake tensors has no values: where a program reads one all the same, it gets 1 or True.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.compat.torch_fake import data_dependent_errors, device_of_fake, fake_backend, fake_mode, is_fake
from lightning_3d.dryrun.meter import Meter
from lightning_3d.dryrun.shape_cache import Remembered, tensors_in
from lightning_3d.strategy.step.totals import BatchTotals

NEW, FEW, MANY = 16, 4096, 2**20
"""Elements up to which tensors are real: new floating-point ones, those that are computed from real ones, and whole numbers and flags."""


class ShapeMeter(Meter):
    """A meter under which new tensors are fake unless they are small."""

    def __init__(self) -> None:
        super().__init__()
        self._mode = fake_mode()
        self._remembered = Remembered(self._mode)

    def fake(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A tensor without values."""
        with self._mode:
            return torch.empty(shape, dtype=dtype, device=device)

    def _is_counted(self, tensor: Tensor) -> bool:
        return is_fake(tensor) or not tensor.is_meta

    def materialize(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Give all parameters and buffers of a module, on meta or in memory, shapes without values. Tied ones stay tied."""
        made: dict[int, Any] = {}
        for owner in module.modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is None or is_fake(parameter):
                    continue
                if id(parameter) not in made:
                    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                    value = nn.Parameter(self.fake(parameter.shape, kind), requires_grad=parameter.requires_grad)
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
        if any(tensor.is_meta for tensor in tensors) or func.namespace in ("c10d", "_c10d_functional"):
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
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], fakes: int
    ) -> Any:
        if name == "_local_scalar_dense":
            return _assumed(args[0])
        if name == "equal":
            return True
        if fakes < len(tensors) and _writes(func) and not is_fake(args[0]):
            if name == "copy_":
                with torch.no_grad():
                    args[0].fill_(1)  # what it is, nobody knows
            return args[0]
        key = self._remembered.key(func, args, kwargs)
        result = self._remembered.recall(key, tensors)
        if result is None:
            with self._mode:
                result = _ask(func, name, args, kwargs)
            self._remembered.note(key, tensors, result)
        return result


def _ask(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "_grouped_mm" and args[0].dtype != torch.bfloat16:  # there are shapes for bf16 only (torch 2.11 to 2.13)
        return func(*(part.bfloat16() for part in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _is_small(tensor: Tensor, few: int) -> bool:
    return tensor.numel() <= (few if tensor.is_floating_point() else MANY)


def _writes(func: Any) -> bool:
    """Whether an operator changes its first argument."""
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def _assumed(tensor: Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


@dataclass
class Told:
    """What ranks of a pipeline tell each other beside tensors, found by running them one after the other.

    Attributes:
        objects: that a rank has broadcast, by its index in the pipeline, in order. totals: numbers of a step that only the last stage has.
        known: called with "shape" when the first rank has told that of messages, with "totals" when the last one has told them.
    """

    objects: dict[int, list[Any]] = field(default_factory=dict)
    totals: BatchTotals | None = None
    known: Callable[[str], None] = lambda what: None


@contextmanager
def alone(rank: int, world_size: int, pipeline: Sequence[int], told: Told, *, gloo: bool) -> Iterator[None]:
    """Process groups of one rank of a world, without any other: collectives return at once and send nothing.

    Args:
        pipeline: global ranks of its pipeline. told: what they tell each other.
        gloo: behave as over gloo, on CPUs; otherwise as over NCCL.

    Raises:
        RuntimeError: this process has process groups already.
    """
    if dist.is_initialized():
        raise RuntimeError("A dry run needs a process without process groups of its own.")
    backend, store = fake_backend(gloo)
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store)
    asked: dict[int, int] = {}
    broadcast = dist.broadcast_object_list

    def broadcast_objects(objects: list[Any], src: int | None = None, group: Any = None, *args: Any, **kwargs: Any) -> None:
        if group is None or src not in pipeline:  # to the whole world, which would say what this rank says
            return
        index = pipeline.index(src)
        if src == rank:
            told.objects.setdefault(index, []).append(list(objects))
            if index == 0:
                told.known("shape")
        elif index in told.objects:
            number = asked[index] = asked.get(index, -1) + 1
            objects[:] = told.objects[index][min(number, len(told.objects[index]) - 1)]

    dist.broadcast_object_list = broadcast_objects  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.broadcast_object_list = broadcast
        dist.destroy_process_group()
