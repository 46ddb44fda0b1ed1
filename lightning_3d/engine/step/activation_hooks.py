"""The user's hooks on gradients of activations, which run while a backward runs: each sees the rows
of one micro-batch on one rank.

`Tensor.register_hook` in a step, and `register_full_backward_hook` and
`register_full_backward_pre_hook` of modules. They get gradients of the size that these have on one
process. A hook that mixes rows, such as one that divides by the norm of all of them, is refused
where it would see a part of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.engine.step.elementwise import base_name, is_elementwise, treats_rows_alike
from lightning_3d.engine.step.loss_scale import LossScale
from lightning_3d.engine.step.micro_batches import MicroBatches
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.partial_tensors import OF_THE_PART, OF_THE_WHOLE
from lightning_3d.parallel.pipeline.left_behind import is_users

_TABLES = ("_backward_hooks", "_backward_pre_hooks")


class ActivationHooks:
    """Stands between autograd and the user's hooks on activations.

    Args:
        root: the user's module.
        scale: size of the gradients.
        mesh: process groups.
    """

    def __init__(self, root: nn.Module, scale: LossScale, mesh: Mesh) -> None:
        self._root, self._mesh, self.scale = root, mesh, scale
        self._replaced: list[tuple[dict[int, Any], int, Any]] = []
        self._looks_for_functions = True
        self._sees_part = False

    def begin_fit(self) -> None:
        """Begin a fit: guard the hooks of modules."""
        self.end()
        self._looks_for_functions = True
        for module in self._root.modules():
            for table in (vars(module)[name] for name in _TABLES):
                for number, hook in table.items():
                    if is_users(hook):
                        self._replaced.append((table, number, hook))
                        table[number] = self._guarded(hook)
                        self.scale.sees = True

    def end(self) -> None:
        """End a fit."""
        for table, number, hook in self._replaced:
            if number in table:
                table[number] = hook
        self._replaced.clear()

    @contextmanager
    def watching(self, micro_batches: MicroBatches) -> Iterator[None]:
        """Context of one call of the user's step."""
        layout = self._mesh.layout
        self._sees_part = len(micro_batches) > 1 or layout.world_size > layout.pp
        register, apply = Tensor.register_hook, vars(torch.autograd.Function)["apply"]

        @wraps(register)
        def guarded(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            # a mode calls this twice
            wanted = tensor.grad_fn is not None and is_users(hook) and not hasattr(hook, "guards")
            self.scale.sees = self.scale.sees or wanted
            return register(tensor, self._guarded(hook) if wanted else hook)

        def noted(kind: Any, *args: Any, **kwargs: Any) -> Any:
            self.scale.sees = self.scale.sees or is_users(kind.backward)
            return apply.__func__(kind, *args, **kwargs)

        Tensor.register_hook = guarded  # type: ignore[method-assign]
        if self._looks_for_functions:
            torch.autograd.Function.apply = classmethod(noted)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Tensor.register_hook = register  # type: ignore[method-assign]
            if self._looks_for_functions:
                torch.autograd.Function.apply = apply  # type: ignore[method-assign]
            self._looks_for_functions = False

    def _guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def guard(*args: Any) -> Any:
            correction = self.scale.correction
            scaled = [_times(value, correction) for value in args]
            before = [value._version for value in _tensors(scaled)]
            rows = _Rows(scaled, sharded=self._mesh.size("tp") > 1)
            with rows:
                result = hook(*scaled)
            writes = before != [value._version for value in _tensors(scaled)]
            if result is None and not writes:
                return None
            self.scale.changes = self.scale.changes or not rows.only_scales or writes
            if rows.mixed and self._sees_part:
                raise self._refusal(hook, rows.mixed)
            return _times(
                scaled[min(1, len(scaled) - 1)] if result is None else result, 1 / correction
            )

        guard.guards = hook  # type: ignore[attr-defined]
        return guard

    def _refusal(self, hook: Callable[..., Any], mixed: str) -> ConfigError:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        return ConfigError(
            f"The hook {name} changes a gradient by {mixed}, which needs all rows and features of"
            f" the batch, but in {self._mesh.layout} it sees those of one micro-batch on one rank."
            " Hooks that treat elements alike (clamp, scale, mask) work everywhere. Use one rank"
            " and micro_batch_size=None, or clip gradients of parameters with"
            " Trainer(gradient_clip_val=...)."
        )


class _Rows(TorchFunctionMode):
    """Notes the first function that mixes rows of the gradients that a hook got, and whether it
    only scales them.

    Args:
        value: what the hook gets.
        sharded: whether dimensions after the first may be shards, too.
    """

    def __init__(self, value: Any, *, sharded: bool) -> None:
        super().__init__()
        self._known = {id(tensor): tensor for tensor in _tensors(value)}
        self._sharded = sharded
        self.mixed = ""
        self.only_scales = True

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        target = next(
            (
                value
                for value in _tensors([args, list(kwargs.values())])
                if id(value) in self._known
            ),
            None,
        )
        if (
            target is None
            or func in OF_THE_WHOLE
            or func in OF_THE_PART
            or not isinstance(result, Tensor)
        ):
            self._note(func, target, result)
            return result
        self.only_scales = self.only_scales and self._scales(func, target, args)
        alike = is_elementwise(func, target, args, kwargs)
        if not alike and (self._sharded or not treats_rows_alike(func, target, args, kwargs)):
            self.mixed = self.mixed or base_name(func)
        self._known[id(result)] = result
        return result

    def _scales(self, func: Any, target: Tensor, args: tuple[Any, ...]) -> bool:
        """Whether a function multiplies a gradient by what does not depend on it, so that the size
        of the gradient does not matter."""
        known = [value for value in _tensors(args) if id(value) in self._known]
        divides = func in (torch.div, Tensor.div, Tensor.__truediv__) and args[0] is target
        return len(known) == 1 and (divides or base_name(func) in ("mul", "neg"))

    def _note(self, func: Any, target: Tensor | None, result: Any) -> None:
        """Note a number that left the tensors: what is computed from it is not seen."""
        if (
            target is not None
            and isinstance(result, (bool, int, float))
            and base_name(func) in ("item", "bool", "float", "int", "tolist")
        ):
            self.mixed = self.mixed or base_name(func)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [found for item in value for found in _tensors(item)]
        if isinstance(value, (list, tuple))
        else []
    )


def _times(value: Any, factor: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value * factor.to(value.dtype)
    return (
        type(value)(_times(item, factor) for item in value)
        if isinstance(value, (list, tuple))
        else value
    )
