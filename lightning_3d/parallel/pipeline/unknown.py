"""What a call of the model returns before the last stage, where its output is not known."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from numbers import Number
from typing import Any

import torch

from lightning_3d.errors import PlanError


class Unknown:
    """A value that only the last stage knows. What is computed from it is unknown too, so that the
    user's step can go on to its next call.

    Nothing is computed: attributes, items, calls, operators, rounding, `with` and functions of
    torch return another unknown value, and a text says that the value is not here. Code that needs
    the value itself, as a condition or a Python number, is refused.

    Args:
        origin: what returned it, for messages.
        device: device of the tensors that it stands for.
    """

    def __init__(self, origin: str, device: torch.device | None = None) -> None:
        self.__dict__.update(unknown_origin=origin, device=device)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Unknown:
        (found,) = first_unknown([args, kwargs or {}])
        name = getattr(function, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if (writes and args and isinstance(args[0], torch.Tensor)) or isinstance(
            (kwargs or {}).get("out"), torch.Tensor
        ):
            found.pass_over()
            # the tensor would keep its old values, which a later call of the model might get as its
            # input
            raise PlanError(
                f"The step writes the value of {found.unknown_origin} into a tensor ({name}) before"
                " its last call of the model. With pp > 1 only the last stage has this value. Make"
                " a new tensor instead (torch.where, torch.cat), or use a layout with pp = 1."
            )
        return found.unknown_like()

    def unknown_like(self) -> Unknown:
        """Return what is computed from this value."""
        return type(self)(self.unknown_origin, self.device)

    def pass_over(self) -> None:
        """Do nothing where the step logs or returns this value: the last stage does it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.unknown_like()

    def __setattr__(self, name: str, value: Any) -> None:
        """Ignore a change of a value that is not here."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore a change of a value that is not here."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.unknown_like()

    def __format__(self, form: str) -> str:
        """Return the text for any format: `f"{loss:.3f}"` of a message that a later stage
        prints."""
        return repr(self)

    def __enter__(self) -> Unknown:
        return self.unknown_like()

    def __exit__(self, *error: Any) -> None:
        """Let an error of the block through."""

    def __iter__(self) -> Iterator[Unknown]:
        """Unpack into as many values as the calling line names (`a, b = value`), as torch.fx
        does."""
        frame = sys._getframe(1)
        unpacking = next(
            (step for step in dis.get_instructions(frame.f_code) if step.offset == frame.f_lasti),
            None,
        )
        if unpacking is None or unpacking.opname != "UNPACK_SEQUENCE" or not unpacking.argval:
            self._refuse()
        return iter([self.unknown_like() for _ in range(unpacking.argval)])  # type: ignore[union-attr]

    def _refuse(self, *args: Any) -> Any:
        raise PlanError(
            f"The step needs the value of {self.unknown_origin} in Python (a condition, a loop, a"
            " number or a key) before its last call of the model, or a hook needs what the step"
            " has kept of it. With pp > 1 only the last stage has this value. In the step, do that"
            " after the last call of the model, or compute with tensors (torch.where). For hooks,"
            " log numbers in the step, or return them from it: all ranks get them as `outputs` of"
            " on_train_batch_end and on_validation_batch_end. Or use a layout with pp = 1."
        )

    __bool__ = __float__ = __int__ = __index__ = __len__ = __contains__ = __complex__ = (
        __array__
    ) = _refuse

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<value of {self.unknown_origin}, which only the last stage knows>"


def _operator(self: Unknown, *others: Any) -> Unknown:
    return self.unknown_like()


Number.register(Unknown)  # so that Lightning's `log` in a hook asks for its value
for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
):
    setattr(Unknown, f"__{_name}__", _operator)
    setattr(Unknown, f"__r{_name}__", _operator)
for _name in (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "neg",
    "pos",
    "abs",
    "invert",
    "getitem",
    "round",
    "trunc",
    "floor",
    "ceil",
):
    setattr(Unknown, f"__{_name}__", _operator)


class Partial(Unknown):
    """A value that no rank has as one process does. It can be passed around and printed; whatever
    needs it is refused.

    Args:
        origin: what it is, for messages.
        reason: why no rank has it, and what works.
    """

    def __init__(self, origin: str, reason: str) -> None:
        super().__init__(origin)
        self.__dict__["reason"] = reason

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Unknown:
        (found,) = first_unknown([args, kwargs or {}])
        return found.unknown_like()

    def unknown_like(self) -> Unknown:
        """Refuse what is computed from this value."""
        self._refuse()
        raise AssertionError

    def pass_over(self) -> None:
        """Refuse to log or return this value."""
        self._refuse()

    def _refuse(self, *args: Any) -> Any:
        raise PlanError(f"The step reads {self.unknown_origin}. {self.reason}")

    def __repr__(self) -> str:
        return f"<{self.unknown_origin}, of which this rank has a part>"

    __bool__ = __float__ = __int__ = __index__ = __len__ = __contains__ = __complex__ = (
        __array__
    ) = __iter__ = _refuse
    __setattr__ = __setitem__ = __enter__ = _refuse  # type: ignore[assignment]


def first_unknown(value: Any) -> list[Unknown]:
    """Find the first unknown value in nested tuples, lists, dicts and dataclasses, as a list of
    one; an empty list if there is none."""
    if isinstance(value, Unknown):
        return [value]
    return next((found for item in _items(value) if (found := first_unknown(item))), [])


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if is_dataclass(value) and not isinstance(value, type):
        return (getattr(value, field.name, None) for field in fields(value))
    return value if isinstance(value, (tuple, list)) else ()
