"""What forwards of blocks leave in attributes (losses, counters, outputs). Each stage has it for
its own blocks only.

Attributes that configure a block are the same on every stage, so that stubs answer them. Those that
a forward writes are not. They are found by the code of its class, and by what changes while a block
of this stage runs for the first time.
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any, NoReturn
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.parallel.pipeline.unknown import Unknown

_LIBRARIES = ("torch", "transformers", "lightning_3d", "lightning", "deepspeed", "peft", "builtins")
"""Packages whose code and hooks are not the user's."""

_INTERNAL = frozenset(vars(nn.Module()))

HOOKS = frozenset(
    {
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    }
)
"""Attributes in which a module keeps its forward hooks."""


_RETURN_IT = (
    "Let each block take the value and return it behind the hidden states, `x, loss = block(x,"
    " loss)`, and name it in the plan, {'pp': {..., 'blocks': (['x', 'loss'], ['x', 'loss']),"
    ' ...}}, or pass plan="auto" (docs/your_model.md). Or use a layout with pp = 1.'
)


class Elsewhere(Unknown):
    """A value that only another pipeline stage has, such as an attribute that the forward of its
    block writes.

    Unlike an output of the model, the last stage never gets it. So a step that logs it, returns it
    or needs its value is refused.
    """

    def __repr__(self) -> str:
        return f"<{self.unknown_origin}, which is on another pipeline stage>"

    def pass_over(self) -> None:
        """Refuse the value: no stage completes what this one lacks."""
        self._refuse()

    def _refuse(self, *args: Any) -> NoReturn:
        raise PlanError(
            f"The step reads {self.unknown_origin}, which is on another pipeline stage: with pp >"
            " 1, each rank has what the forwards of its own blocks leave in attributes and hooks."
            f" {_RETURN_IT}"
        )

    __bool__ = __float__ = __int__ = __index__ = __len__ = __contains__ = __complex__ = (
        __array__
    ) = _refuse


class LeftBehind:
    """The attributes that forwards of blocks write, on the stubs and on the blocks of this rank's
    other stages."""

    def __init__(self) -> None:
        # (name of the module in its block, name of the attribute)
        self._places: set[tuple[str, str]] = set()
        self._stubs: list[tuple[str, Any]] = []
        self._blocks: dict[int, tuple[str, nn.Module]] = {}
        self._watched: set[tuple[int, bool]] = set()
        self._hidden: list[tuple[nn.Module, str, Unknown, Any]] = []
        self._around: list[tuple[str, ReferenceType[nn.Module]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> LeftBehind:
        """Share this object: a copy of one block (weight averaging) must not copy all others."""
        return self

    def look_around(self, root: nn.Module, layers: str) -> None:
        """Follow the modules in `root` outside of the blocks `layers`, whose attributes no block
        may write."""
        self._around = [
            (name, ref(module))
            for name, module in root.named_modules()
            if not f"{name}.".startswith(f"{layers}.")
        ]

    def add_stub(self, path: str, stub: Any) -> None:
        """Let a stub of a module in a block stop answering what forwards of such modules write.

        Args:
            path: name of the module in its block.
            stub: object with a method `forget(name)`.
        """
        self._stubs.append((path, stub))

    def add_block(self, index: int, name: str, block: nn.Module) -> None:
        """Follow a block of this rank, called `name`."""
        self._blocks[index] = name, block

    @contextmanager
    def watching(self, index: int) -> Iterator[None]:
        """Note what the first forward of a block changes, in training and in evaluation.

        Raises:
            PlanError: it leaves a value that has a gradient outside of the block, where later
                stages have only their own.
        """
        key = (index, torch.is_grad_enabled())
        if key in self._watched or index not in self._blocks:
            yield
            return
        self._watched.add(key)
        block = self._blocks[index][1]
        before, around = contents_of(block), self._contents_around(block)
        yield
        self._refuse_outside(index, around)
        found = {
            place
            for place, content in contents_of(block).items()
            if not is_same(before.get(place), content)
        } - self._places
        self._places |= found
        for path, stub in self._stubs:
            for _, name in (place for place in found if place[0] == path):
                stub.forget(name)

    def _contents_around(self, block: nn.Module) -> dict[str, _Content]:
        """What is in the modules outside of the blocks, and in the variables of the files in which
        the user's blocks are written."""
        inside = set(block.modules())
        modules = {
            name: module
            for name, weak in self._around
            if (module := weak()) is not None and module not in inside
        }
        files = {
            kind.__module__
            for module in inside
            for kind in type(module).__mro__
            if not _is_library(kind.__module__)
        }
        found = {
            f"{file}.{name}": value
            for file in files
            for name, value in getattr(sys.modules.get(file), "__dict__", {}).items()
        }
        found |= {
            f"{path}.{name}": value
            for path, module in modules.items()
            for name, value in vars(module).items()
        }
        return {
            name: _content(value)
            for name, value in found.items()
            if name.rpartition(".")[2] not in _INTERNAL
        }

    def _refuse_outside(self, index: int, before: dict[str, _Content]) -> None:
        """Raise PlanError if values with a gradient are new outside of block `index`."""
        name, block = self._blocks[index]
        for place, content in self._contents_around(block).items():
            if any(_has_gradient(value) for value in (content[0], *content[2])) and not is_same(
                before.get(place), content
            ):
                raise PlanError(
                    f"The forward of '{name}' writes a value that has a gradient into"
                    f" '{place.lstrip('.')}', outside of the block. With pp > 1, each rank has what"
                    f" its own blocks write there, and the loss would lack the rest. {_RETURN_IT}"
                )

    def hide(self, running: range) -> None:
        """Put what blocks of this rank's other stages have written out of the step's reach: it is
        that of another micro-batch."""
        for index, (name, block) in self._blocks.items():
            if index in running:
                continue
            for path, module in block.named_modules():
                places = {place for inner, place in self._places if inner == path} | written_by(
                    module
                )
                for attribute in places & {*vars(module), *module._buffers}:
                    self.put_away(
                        module,
                        attribute,
                        Elsewhere(f"the attribute '{attribute}' of '{name}{path and '.'}{path}'"),
                    )

    def put_away(self, module: nn.Module, attribute: str, value: Unknown) -> None:
        """Let `value` take the place of an attribute until `show`."""
        self._hidden.append((module, attribute, value, vars(module).get(attribute, _NOTHING)))
        vars(module)[attribute] = value

    def show(self) -> None:
        """Undo `hide` and `put_away`; what the step has written since then stays."""
        for module, attribute, value, earlier in self._hidden:
            if vars(module).get(attribute) is value:
                del vars(module)[attribute]
                vars(module).update({} if earlier is _NOTHING else {attribute: earlier})
        self._hidden = []


_NOTHING = object()


def call_hooks(block: nn.Module, name: str) -> None:
    """Call the user's forward hooks on a block that is on another stage, and on modules in it, with
    values that are not here.

    So what a hook collects has its full length, and a step that uses what is missing is refused. A
    hook that needs the values themselves has them on the stage of its block alone.
    """
    # nearly always, and each micro-batch passes every block of the other stages
    if not _is_hooked(block):
        return
    for path, module in block.named_modules():
        missing = Elsewhere(f"what a hook has seen of '{name}{path and '.'}{path}'")
        for owner in (module, vars(module).get("absent_hooks")):
            for hook, with_keywords, before in _users_hooks(owner):
                inputs: list[Any] = [(missing,), {}] if with_keywords else [(missing,)]
                with suppress(Exception):
                    hook(module, *inputs, *([] if before else [missing]))


def _is_hooked(block: nn.Module) -> bool:
    """Return whether a block or a module in it has forward hooks."""
    waiting = [block]
    while waiting:
        own = vars(waiting.pop())
        absent = own.get("absent_hooks")
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or (absent is not None and any(vars(absent).values()))
        ):
            return True
        waiting += [module for module in own["_modules"].values() if module is not None]
    return False


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Keep the user's forward hooks of a module from being called."""
    taken = []
    for key in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = vars(module)[key]
        if any(is_users(hook) for hook in hooks.values()):
            taken.append((key, hooks))
            vars(module)[key] = type(hooks)(
                (number, hook) for number, hook in hooks.items() if not is_users(hook)
            )
    try:
        yield
    finally:
        vars(module).update(taken)


def _users_hooks(module: Any) -> Iterator[tuple[Callable[..., Any], bool, bool]]:
    """Yield the user's forward hooks of a module, whether each gets keywords, and whether it runs
    before the forward."""
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        for number, hook in list(getattr(module, kind, {}).items()):
            if is_users(hook):
                yield (
                    hook,
                    number in getattr(module, f"{kind}_with_kwargs"),
                    kind == "_forward_pre_hooks",
                )


def is_users(hook: Any) -> bool:
    """Return whether a hook is not of a library."""
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return not _is_library(module)


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def attributes_of(module: nn.Module) -> frozenset[str]:
    """Names of what a module has of its own: attributes, buffers and parameters, but not
    submodules."""
    return frozenset({*vars(module), *module._buffers, *module._parameters} - _INTERNAL)


def written_by(module: nn.Module) -> frozenset[str]:
    """Names of attributes that the forward of a module's class, or a method that it calls, assigns.
    Code of libraries is not read."""
    kind: Any = type(module)
    return _written_by(kind)


@lru_cache(maxsize=1024)
def _written_by(kind: type[nn.Module]) -> frozenset[str]:
    own = [base for base in kind.__mro__ if not _is_library(base.__module__)]
    methods: dict[str, list[FunctionType]] = {}
    for base in own:
        for name, value in vars(base).items():
            if isinstance(function := unwrap(value) if callable(value) else value, FunctionType):
                methods.setdefault(name, []).append(function)
    found: set[str] = set()
    waiting = ["forward"]
    while waiting:
        for step in (
            step
            for function in methods.pop(waiting.pop(), ())
            for step in _instructions(function.__code__)
        ):
            if step.opname == "STORE_ATTR":
                found.add(step.argval)
            elif isinstance(step.argval, str) and step.argval in methods:
                waiting.append(step.argval)
    return frozenset(found)


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


_Content = tuple[Any, int, list[Any]]
"""A value, its version (tensors count their changes), and what is in it. All are kept, so that
nothing new gets the address of one."""


def contents_of(block: nn.Module) -> dict[tuple[str, str], _Content]:
    """Contents of the attributes and buffers in a module, by (name of the module in it, name of the
    attribute)."""
    return {
        (path, name): _content(value)
        for path, module in block.named_modules()
        for name, value in (vars(module) | module._buffers).items()
        if name not in _INTERNAL
    }


def _content(value: Any) -> _Content:
    if isinstance(value, Tensor):
        return value, 0 if value.is_inference() else value._version, []
    if isinstance(value, dict):
        return value, 0, [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, deque)):
        return value, 0, list(value)
    inner = {} if isinstance(value, (type, nn.Module, Callable)) else getattr(value, "__dict__", {})  # type: ignore[arg-type]
    return value, 0, list(inner.values())


def is_same(before: _Content | None, after: _Content) -> bool:
    """Return whether an attribute is as it was before."""
    if before is None or before[1] != after[1] or len(before[2]) != len(after[2]):
        return False
    pairs = [(before[0], after[0]), *zip(before[2], after[2], strict=True)]
    return all(
        old is new or (isinstance(new, (bool, int, str)) and type(old) is type(new) and old == new)
        for old, new in pairs
    )
