"""Answers from host memory what a model asks about masks and positions, so that a training step
does not wait for the device.

Models of Transformers choose the form of their attention by values of its inputs: is there padding,
are sequences packed? On a GPU each such question waits until all earlier work is done. But the
batch was in host memory before it was moved, and models derive from it what they ask about by a few
operators on whole numbers, which the host can compute as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_3d.compat.torch import innermost_function_mode, storage_key
from lightning_3d.compat.transformers import models_in
from lightning_3d.compat.transformers_flash import answer_flash_attention
from lightning_3d.engine.step.checks import ALWAYS, EVERY, NowAndThen
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.parallel.blocks import find_blocks

LARGEST = 1 << 22
"""Elements of the largest tensor whose values the host computes: in some milliseconds."""

WHOLE_NUMBERS = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)
"""Types that every device computes alike."""


class _Known(NamedTuple):
    """Values of a tensor.

    Attributes:
        tensor: reference that does not keep it alive.
        values: in host memory; nobody else has this memory.
        writes: how often torch had written to the tensor or its views when it had these values.
    """

    tensor: ref[Tensor]
    values: Tensor
    writes: int


_OTHER_VALUES = (
    "A mask or positions in the memory of the device are not what was copied there or computed from"
    " it. A collective (torch.distributed) or a kernel of your own writes to a tensor of the batch,"
    " and torch does not count such writes. From now on, models read masks from the device, and the"
    " host waits for each read. To avoid that, put a new tensor into the batch instead of writing"
    " to it."
)


class _UnknownValue(Exception):
    """An operator reads a tensor whose values the host does not know."""


_NOT_ON_HOST = (_UnknownValue, RuntimeError, IndexError)
"""What makes a result unknown; an operator may fail on a host copy whose strides are not those of
the tensor (`view`)."""


class KnownValues(TorchFunctionMode):
    """Knows the values of small tensors on the device: of batches, of ranges, and of what operators
    on whole numbers make of them.

    While `following`, the operators in `FOLLOWED` run on the host copies too, and a read (`bool`,
    `item`, `tolist`, `cpu`) of a known tensor is answered from its host copy. All other reads wait
    for the device as before. A tensor is unknown once something has written to its memory. torch
    counts writes to a tensor and its views; access to memory where writes are not counted, such as
    `.data`, makes the tensor unknown at once. torch counts no writes by collectives and by kernels
    of other libraries. So, in some batches (`NowAndThen`), whatever is asked about is read from the
    device too; if it differs, nothing is followed any more.

    The mode costs the host some microseconds for each function of torch, so it is left inside
    blocks, where nearly all of them are called. A compiler that traces it finds nothing.

    Args:
        device: device of the model.
        wanted: whether reads wait for this device; if not, every context is empty.
    """

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        super().__init__()
        self._device, self._wanted = device, wanted
        self._known: dict[int, _Known] = {}  # by `id` of the tensor
        self._hooks: list[RemovableHandle] = []
        self._undo: Callable[[], None] = lambda: None
        self._turn = NowAndThen()
        self._compares = False
        self._moves = False
        self._left_in: nn.Module | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> KnownValues:
        """Share this object: blocks of a copied module (weight averaging) have its hooks."""
        return self

    def begin(self, root: nn.Module) -> None:
        """Begin a fit of `root`: leave the mode inside its blocks. Nothing is followed if no model
        of Transformers is in it."""
        self.end()
        # the hooks of this fit may write what those of an earlier one did not
        self._turn = NowAndThen()
        self._wanted = self._wanted and bool(models_in(root))
        if self._wanted:
            for block in find_blocks(root, ParallelPlan({})):  # of all models in it, such as towers
                self._hooks += [
                    block.register_forward_pre_hook(self._leave),
                    block.register_forward_hook(self._return),
                ]
            # inside blocks, also where a backward runs them again
            self._undo = answer_flash_attention(self._confirmed)

    def begin_batch(self, *, begins: bool) -> None:
        """Begin a batch.

        Args:
            begins: whether no other batch of the same optimizer step came before.
        """
        self._compares = self._turn.comes(begins=begins)

    def end(self) -> None:
        """End a fit."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._undo()
        self._undo = lambda: None
        self._known.clear()

    # Where

    def following(self) -> AbstractContextManager[None]:
        """Context in which known tensors are followed and reads of them answered."""
        return self._active(moves=False) if self._wanted else nullcontext()

    def moving(self) -> AbstractContextManager[None]:
        """Context that moves a batch to the device: its tensors of whole numbers are known from
        then on."""
        return self._active(moves=True) if self._wanted else nullcontext()

    @contextmanager
    def _active(self, *, moves: bool) -> Iterator[None]:
        self._moves, self._left_in = moves, None
        self.__enter__()
        try:
            yield
        finally:
            # otherwise a block has failed, outside of which this mode ends
            if self._left_in is None:
                self.__exit__(None, None, None)
            self._known = {
                place: known for place, known in self._known.items() if known.tensor() is not None
            }

    def _leave(self, block: nn.Module, *args: Any) -> None:
        """Leave the mode before a block runs, unless modes of others are inside this one."""
        if not torch.compiler.is_compiling() and innermost_function_mode() is self:
            self.__exit__(None, None, None)
            self._left_in = block

    def _return(self, block: nn.Module, *args: Any) -> None:
        if not torch.compiler.is_compiling() and self._left_in is block:
            self.__enter__()
            self._left_in = None

    # What

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        rule = None if torch.compiler.is_compiling() else _RULES.get(func)
        return func(*args, **kwargs) if rule is None else rule(self, func, args, kwargs)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; its result is known if all tensors that it reads are. One that it has
        written to (`out`) is not any more."""
        result = func(*args, **kwargs)
        results = result if type(result) in (tuple, list) else (result,)
        if all(map(self._may_know, results)):
            with suppress(*_NOT_ON_HOST):
                values = func(*self._on_host(args), **self._on_host(kwargs))
                for made, its in zip(
                    results, values if results is result else (values,), strict=True
                ):
                    self._know(made, its)
        return result

    def make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that makes a tensor on the device that it is asked for or on the default
        one."""
        result = func(*args, **kwargs)
        if self._may_know(result):
            with suppress(*_NOT_ON_HOST):
                self._know(
                    result, func(*self._on_host(args), **self._on_host(kwargs) | {"device": "cpu"})
                )
        return result

    def convert(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the type or device of a tensor."""
        result = func(*args, **kwargs)
        if self._may_know(result):
            found = self._values_of(args[0])
            if found is not None:
                self._know(result, found.to(result.dtype))
            elif self._moves and args[0].is_cpu:
                # the data set may use its memory again
                self._know(result, args[0].to(result.dtype, copy=True))
        return result

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read the host copy of a known tensor instead of the tensor."""
        values = self._confirmed(args[0])
        return func(*args, **kwargs) if values is None else self.read_host_copy(func, values)

    def _confirmed(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor if they are known, and are those on the device in a batch
        in which this is compared."""
        values = self._values_of(tensor)
        return (
            None
            if values is not None and self._compares and not self._confirms(tensor, values)
            else values
        )

    def _confirms(self, tensor: Tensor, values: Tensor) -> bool:
        """Return whether a tensor on the device has these values. If not, warn and follow nothing
        any more."""
        if torch.equal(tensor.cpu(), values):
            return True
        self._wanted = False
        self._known.clear()
        earlier = (
            ""
            if self._turn.seen <= ALWAYS
            else f" Masks of the last {EVERY} batches may have been wrong, too."
        )
        warnings.warn(_OTHER_VALUES + earlier, stacklevel=2)
        return False

    @staticmethod
    def read_host_copy(func: Any, values: Tensor) -> Any:
        """Read values in host memory. A tensor is a copy of them, to which the caller may write."""
        found = func(values)
        return found.clone() if isinstance(found, Tensor) else found

    def forget(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function through which memory may be written without being counted."""
        if isinstance(args[0], Tensor) and args[0].dtype in WHOLE_NUMBERS:
            try:
                memory = storage_key(args[0])
                for place, known in list(self._known.items()):
                    if (tensor := known.tensor()) is None or storage_key(tensor) == memory:
                        del self._known[place]
            except RuntimeError:
                # a tensor without memory of its own, as in transforms of torch.func
                self._known.clear()
        return func(*args, **kwargs)

    def _may_know(self, value: Any) -> bool:
        return (
            self._wanted
            and type(value) is Tensor
            and value.dtype in WHOLE_NUMBERS
            and value.ndim <= 2
            and value.device.type == self._device.type
            and value.numel() <= LARGEST
            and not value.is_inference()  # writes to such a tensor are not counted
        )

    def _know(self, tensor: Tensor, values: Tensor) -> None:
        self._known[id(tensor)] = _Known(ref(tensor), values, tensor._version)

    def _values_of(self, tensor: Tensor) -> Tensor | None:
        known = self._known.get(id(tensor))
        # `id` may be that of a tensor that is gone
        if known is None or known.tensor() is not tensor:
            return None
        return known.values if known.writes == tensor._version else None

    def _on_host(self, value: Any) -> Any:
        """Replace tensors by their host copies, in arguments of a function.

        Raises:
            _UnknownValue: one of them is not known.
        """
        if isinstance(value, Tensor):
            if (found := self._values_of(value)) is None:
                raise _UnknownValue
            return found
        if type(value) in (tuple, list):
            return type(value)([self._on_host(item) for item in value])
        if isinstance(value, slice):
            return slice(
                self._on_host(value.start), self._on_host(value.stop), self._on_host(value.step)
            )
        return (
            {name: self._on_host(item) for name, item in value.items()}
            if type(value) is dict
            else value
        )


Rule = Callable[[KnownValues, Any, tuple[Any, ...], dict[str, Any]], Any]

FOLLOWED = (
    "__getitem__ unsqueeze squeeze expand expand_as broadcast_to view reshape flatten select narrow"
    " transpose detach contiguous clone split chunk unbind cat stack repeat flip roll pad where"
    " masked_fill add sub rsub mul neg abs clamp maximum minimum __add__ __sub__ __rsub__ __mul__"
    " eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ logical_and logical_or"
    " logical_not bitwise_and bitwise_or bitwise_not __and__ __or__ __invert__ sum cumsum diff all"
    " any max min amax amin count_nonzero"
)
"""Operators whose results on whole numbers are the same on every device. Where elements are equal,
places of the largest are not."""


def _named(names: str) -> list[Any]:
    """Functions and methods of torch, by name."""
    owners = (torch, Tensor, nn.functional)
    return [
        getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)
    ]


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_named(FOLLOWED), KnownValues.follow),
    **dict.fromkeys(
        _named(
            "arange tensor ones zeros full ones_like zeros_like full_like new_ones new_zeros"
            " new_full"
        ),
        KnownValues.make,
    ),
    **dict.fromkeys(
        (getattr(Tensor, name) for name in ("to", "cuda", "bool", "int", "long")),
        KnownValues.convert,
    ),
    **dict.fromkeys(
        _named("__bool__ __int__ __index__ item tolist is_nonzero cpu"), KnownValues.answer
    ),
    **dict.fromkeys(_named("data_ptr untyped_storage storage __dlpack__"), KnownValues.forget),
    Tensor.data.__get__: KnownValues.forget,  # type: ignore[attr-defined]
}
