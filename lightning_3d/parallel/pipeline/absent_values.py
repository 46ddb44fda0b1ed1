"""Parameters of other pipeline stages, for hooks that run between steps: what is written to them is
written where they are."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.partial_tensors import OF_THE_PART, OF_THE_WHOLE, changes_in_place

_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__


class AbsentValue(Tensor):
    """A parameter of another stage, or a value that was computed from one. Its numbers are NaN.

    The rank that has the parameter runs the same hook, so writes are passed over here. Nothing else
    may depend on the numbers.

    Attributes:
        origin: the name of the parameter, or nothing.
    """

    origin: str = ""

    @classmethod
    def of(cls, blank: Tensor, origin: str = "") -> AbsentValue:
        """Mark a tensor without values."""
        made = blank.as_subclass(cls)
        made.origin = origin
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else None
        if func in OF_THE_WHOLE or func in OF_THE_PART:
            return super().__torch_function__(func, types, args, kwargs)
        if changes_in_place(func, kwargs):
            if isinstance(target, AbsentValue):
                return target
            _refuse()
        if func == _GRADIENT:
            return target
        if func in (
            Tensor.item,
            Tensor.tolist,
            Tensor.numpy,
            Tensor.__bool__,
            Tensor.__float__,
            Tensor.__int__,
            Tensor.__array__,
        ):
            _refuse()
        found = super().__torch_function__(func, types, args, kwargs)
        if isinstance(found, AbsentValue):
            found.origin = next(
                (value.origin for value in tensors_of(args) if isinstance(value, AbsentValue)), ""
            )
        return found


def _refuse() -> NoReturn:
    raise PlanError(
        "A hook uses the values of a parameter that is on another pipeline stage. With pp > 1, each"
        " rank has the parameters of its own stage: a hook can write a parameter from its own"
        " values (p.clamp_(-1, 1), p.copy_(normalize(p))), but not use them for anything else. Use"
        " a layout with pp = 1."
    )


def refuse_absent(values: list[Any]) -> None:
    """Refuse inputs of the model that are computed from parameters of another stage.

    Raises:
        PlanError: one is.
    """
    absent = next((value for value in tensors_of(values) if isinstance(value, AbsentValue)), None)
    if absent is not None:
        what = f"the parameter '{absent.origin}'" if absent.origin else "a parameter"
        raise PlanError(
            f"The step computes an input of the model from {what} of the module. With pp > 1,"
            " parameters outside of the model are on the last stage. Move the parameter into the"
            " model, or use a layout with pp = 1."
        )
