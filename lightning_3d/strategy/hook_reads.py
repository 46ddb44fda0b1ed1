"""Parameters of the parallel model that the user's hooks between steps read and write.

As in steps, tensor-parallel ranks gather what is read. What is written element by element is
written to the shard; anything else is written to the whole parameter, of which each rank keeps its
shard. With pp > 1, a parameter may be written from its own values only, because each rank has the
parameters of its stage.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, NoReturn

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.compat.lightning import has_hook_of_library, hooks_of_user, is_logging
from lightning_3d.compat.torch import innermost_function_mode, is_pickling, storage_key
from lightning_3d.engine.step.elementwise import RANDOM, base_name, is_elementwise
from lightning_3d.engine.step.optimizer_states import guarded_states
from lightning_3d.engine.step.outside_reads import (
    DATA,
    GRADIENT,
    HARMLESS,
    OutsideReads,
    Place,
    is_blank,
)
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.partial_tensors import OF_THE_WHOLE, changes_in_place, with_target_first
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.tensor import gather_shards

_EARLY = ("on_before_zero_grad", "on_before_backward")
"""Hooks that one process calls between the forward and the backward of a step."""

_WITH_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
"""Hooks in which `GradientHooks` looks."""

_SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__
_PASSES = HARMLESS | {GRADIENT, vars(torch._C.TensorBase)["grad"].__set__, Tensor.__deepcopy__}
_VIEWS = (DATA, Tensor.detach, torch.detach)
_NUMBERS = frozenset({"item", "tolist", "float", "int", "numpy"})
_LIBRARIES = (
    "torch",
    "functools",
    "contextlib",
    "lightning",
    "lightning_3d",
    "deepspeed",
    "lightning_utilities",
)
_PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class _Window:
    """A whole parameter, gathered for a view that may be written to.

    Attributes:
        full: the gathered values.
        parameter: this rank's shard.
        version: changes of the shard before.
    """

    place: Place
    full: Tensor
    parameter: Tensor
    version: int


class HookReads(OutsideReads):
    """Sees the functions of torch that the user's hooks between steps call, too."""

    _hook = ""
    _drew = False

    def begin(self) -> None:
        super().begin()
        self._known: dict[str, bool] = {}

    def in_hook(self, trainer: Any, name: str) -> AbstractContextManager[None]:
        """Context of the calls of one hook.

        Args:
            name: of the hook.
        """
        fits = trainer.lightning_module is self._root and trainer.state.fn == TrainerFn.FITTING
        if (
            not fits
            or self._hook
            or name in _WITH_GRADIENTS
            or not (name.startswith("on_") or name == "optimizer_step")
        ):
            return nullcontext()
        if name not in self._known:
            self._known[name] = bool(hooks_of_user(trainer, [name]))
        if not self._known[name]:
            return nullcontext()
        if name in _EARLY:
            return _NoWrites(self._root, name)
        return (
            self._in_hook(trainer, name) if self._places or self._shards_states else nullcontext()
        )

    @contextmanager
    def _in_hook(self, trainer: Any, name: str) -> Iterator[None]:
        self._hook, self._drew = name, False
        self._outside = {
            storage_key(parameter)
            for parameter in self._root.parameters()
            if id(parameter) not in self._places
        }
        self._windows: dict[int, tuple[Tensor, _Window]] = {}
        self._origins: dict[int, tuple[Tensor, frozenset[str]]] = {}
        unwatched = [
            callback for callback in trainer.callbacks if has_hook_of_library(callback, name)
        ]
        for callback in unwatched:
            vars(callback)[name] = self._unwatched(getattr(callback, name))
        try:
            with guarded_states(trainer.optimizers, self._before_state), self._active():
                yield
        except (RuntimeError, KeyError) as error:
            self._explain_names(error)
            raise
        finally:
            for callback in unwatched:
                del vars(callback)[name]
            self._hook = ""
            self._windows, self._origins = {}, {}

    def _unwatched(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook of Lightning or of this package, which takes parameters as each rank has them."""

        @wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return hook(*args, **kwargs)

        return run

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of a step that runs inside a hook (`optimizer_step`)."""
        name = self._hook
        if not name:
            yield
            return
        self._hook, leaves = "", innermost_function_mode() is self
        if leaves:
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            self._hook = name
            if leaves:
                self.__enter__()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self._hook:
            return super().__torch_function__(func, types, args, kwargs)
        args, kwargs = with_target_first(args, kwargs)
        self._drew = self._drew or base_name(func) in RANDOM
        target = args[0] if args and isinstance(args[0], Tensor) else None
        place = self._places.get(id(target))
        sized = place is not None and place.spec.is_cut and func in OF_THE_WHOLE
        copies_blank = func is Tensor.__deepcopy__ and is_blank(args[0])
        passes = self._depth or (func in _PASSES and not sized and not copies_blank)
        if passes or not self._concerns([args, kwargs]) or self._is_of_library(sys._getframe(1)):
            if func is Tensor.clone and is_logging(sys._getframe(1)):
                self._require_own("self.log", None, None, self._origins_of([args]))
            return func(*args, **kwargs)
        if sized and target is not None and place is not None:
            return func(
                target.new_empty(place.spec.global_shape, device="meta"), *args[1:], **kwargs
            )
        if place is not None and (
            func in _VIEWS or (func is Tensor.expand_as and is_blank(args[0]))
        ):
            view = func(*args, **kwargs)
            self._places[id(view)] = place
            self._views.append(view)
            return view
        self._require_here([args, kwargs])
        origins = self._origins_of([args, kwargs])
        if func is Tensor.untyped_storage and is_pickling(sys._getframe(1)):
            self._require_own("torch.save or pickle", None, None, origins)
        if changes_in_place(func, kwargs):
            self._require_own(func, target, place, origins)
            result = self._write(func, args, kwargs, place)
            if target is not None and place is None:
                self._note(target, origins)
            return result
        result = self._read(func, args, kwargs, target, place)
        if base_name(func) in _NUMBERS or (isinstance(result, bool) and len(origins) > 1):
            self._require_own(func, None, None, origins)
        self._note(result, origins)
        return result

    def _before_state(self) -> None:
        """Refuse the state of an optimizer to the user's code."""
        if self._hook and not self._is_of_library(sys._getframe(2)):
            raise ConfigError(
                f"{self._hook} uses the state of an optimizer (its moments, for example). With"
                f" {self._mesh.layout} and this zero_stage, each rank has that of its own"
                " parameters or shards only, so the numbers would differ from those of one"
                " process. Use a dp layout with zero_stage=0, or read a checkpoint: it holds the"
                " whole state."
            )

    def _concerns(self, value: Any) -> bool:
        """Whether a parameter, or what was computed from one, is among the arguments."""
        if isinstance(value, Tensor):
            return any(id(value) in known for known in (self._places, self._windows, self._origins))
        if isinstance(value, (list, tuple)):
            return any(map(self._concerns, value))
        return isinstance(value, dict) and any(map(self._concerns, value.values()))

    @staticmethod
    def _is_of_library(frame: Any) -> bool:
        """Whether code of a library, not of the user's, calls torch."""
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
            "torch",
            "functools",
            "contextlib",
        ):
            frame = frame.f_back
        return frame is None or frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES

    def _require_here(self, value: Any) -> None:
        """Refuse parameters whose values no rank can get here."""
        if isinstance(value, (list, tuple, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                self._require_here(item)
        place = self._places.get(id(value))
        if place is None:
            return
        if is_blank(value):
            raise ConfigError(
                f"{self._hook} uses the parameter '{place.name}', whose values are on several ranks"
                " between batches (zero_stage=3). Use zero_stage=2."
            )

    # With pp > 1: which parameters a value was computed from

    def _origins_of(self, value: Any) -> frozenset[str]:
        if self._mesh.layout.pp == 1:
            return frozenset()
        if isinstance(value, Tensor):
            place = self._places.get(id(value))
            known = self._origins.get(id(value))
            own = frozenset({place.name}) if place is not None and place.of_model else frozenset()
            return own | (known[1] if known is not None else frozenset())
        if isinstance(value, dict):
            value = list(value.values())
        return (
            frozenset().union(*map(self._origins_of, value))
            if isinstance(value, (list, tuple))
            else frozenset()
        )

    def _note(self, result: Any, origins: frozenset[str]) -> None:
        if isinstance(result, Tensor) and origins:
            self._origins[id(result)] = result, origins

    def _require_own(
        self, func: Any, target: Tensor | None, place: Place | None, origins: frozenset[str]
    ) -> None:
        """Refuse to use a parameter of one stage for anything but itself, where other stages would
        use others."""
        others = origins - ({place.name} if place is not None else set())
        outside = target is not None and place is None and storage_key(target) in self._outside
        if not others or (target is not None and place is None and not outside):
            return
        use = func if isinstance(func, str) else base_name(func)
        raise ConfigError(
            f"{self._hook} uses the parameter '{min(others)}' for {use}"
            f"{f' of {place.name!r}' if place is not None else ''}. {self._of_own_stage()}"
        )

    def _explain_names(self, error: Exception) -> None:
        """Explain why parameters are not found by their names, where other stages have them."""
        if self._mesh.layout.pp == 1:
            return
        innermost, _ = list(traceback.walk_tb(error.__traceback__))[-1]
        first, dot, _ = str(error.args[0] if error.args else "").partition(".")
        stage = (
            isinstance(error, KeyError)
            and dot
            and any(hasattr(module, first) for module in (self._root, self._parts.module))
        )
        if stage or innermost.f_code is nn.Module.load_state_dict.__code__:
            what = (
                f"does not find the parameter {error}"
                if stage
                else "loads a state_dict into a module that has other parameters"
            )
            raise ConfigError(f"{self._hook} {what}. {self._of_own_stage()}") from None

    def _of_own_stage(self) -> str:
        layout = self._mesh.layout
        return (
            f"With pp = {layout.pp}, each rank has the parameters of its own stage, and the last"
            " one those next to the model, too. A hook can write a parameter from its own values,"
            " but not copy it to another module or compute a number from several. For an average"
            " of the weights, use lightning's weight averaging callbacks. With pp = 1 such a hook"
            f" is exact, for example tp{layout.tp * layout.pp}_dp{layout.dp}."
        )

    # With tp > 1: whole parameters

    def _gather(self, value: Tensor, place: Place) -> Tensor:
        if not place.spec.is_cut:
            return value
        if place.spec.expert:
            self._refuse_experts(place)
        return gathered_in_hook(
            value, place.spec, self._mesh, f"{self._hook} reads the parameter '{place.name}'"
        )

    def _refuse_experts(self, place: Place) -> NoReturn:
        raise ConfigError(
            f"{self._hook} uses the parameter '{place.name}' of experts that are on several ranks"
            f" (ep = {self._mesh.layout.ep}). Use ep = 1."
        )

    def _whole(self, value: Any) -> Any:
        """The arguments with whole parameters."""
        if not self._hook:
            return super()._whole(value)
        if isinstance(value, Tensor):
            place = self._places.get(id(value))
            return value if place is None else self._gather(value, place)
        if isinstance(value, (list, tuple)):
            items = [self._whole(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return (
            {key: self._whole(item) for key, item in value.items()}
            if isinstance(value, dict)
            else value
        )

    def _read(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Tensor | None,
        place: Place | None,
    ) -> Any:
        """Call a function on whole parameters. If it returns a view of one, what is written to the
        view reaches the parameter."""
        known = self._windows.get(id(target))
        window = known[1] if known is not None else None
        if window is None and target is not None and place is not None and place.spec.is_cut:
            window = _Window(place, self._gather(target, place), target, target._version)
            args = (window.full, *args[1:])
        result = func(*self._whole(args), **self._whole(kwargs))
        if window is not None:
            for view in result if isinstance(result, (list, tuple)) else [result]:
                if (
                    isinstance(view, Tensor)
                    and view.device == window.full.device
                    and _shares_memory(view, window.full)
                ):
                    self._windows[id(view)] = view, window
        return result

    def _write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place | None
    ) -> Any:
        known = self._windows.get(id(args[0])) if args else None
        if known is not None:
            return self._write_through(known[1], func, args, kwargs)
        if func.__name__.startswith("_foreach_") and isinstance(args[0], (list, tuple)):
            return self._write_each(func, args, kwargs)
        if place is None:
            return func(*self._whole(args), **self._whole(kwargs))
        self._refuse_random(place)
        own, own_kwargs = self._own_part(args[1:], place), self._own_part(kwargs, place)
        if func == _SET_DATA:  # master weights follow the memory that is there
            func = Tensor.copy_
        if not place.spec.is_cut or is_elementwise(func, args[0], own, own_kwargs):
            return func(args[0], *own, **own_kwargs)
        window = _Window(place, self._gather(args[0], place), args[0], args[0]._version)
        self._write_through(window, func, (window.full, *args[1:]), kwargs)
        return args[0]

    def _write_through(
        self, window: _Window, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Write to a whole parameter, or to a view of it, and keep this rank's shard."""
        self._refuse_random(window.place)
        if window.parameter._version != window.version:
            raise ConfigError(
                f"{self._hook} writes to '{window.place.name}' while it holds a view of it that is"
                " older. Take the view again after each write, or use tp = 1."
            )
        result = func(*self._whole(args), **self._whole(kwargs))
        with torch.no_grad():
            window.parameter.detach().copy_(window.place.spec.cut(window.full))
        fresh = _Window(window.place, window.full, window.parameter, window.parameter._version)
        for key, (view, held) in list(self._windows.items()):
            if held is window:
                self._windows[key] = view, fresh
        return result

    def _write_each(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write to each tensor of a list, element by element (`torch._foreach_mul_`)."""
        places = [self._places.get(id(target)) for target in args[0]]

        def own(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and len(value) == len(places):
                pairs = zip(value, places, strict=True)
                return [
                    self._whole(item) if place is None else self._own_part(item, place)
                    for item, place in pairs
                ]
            return self._whole(value)

        for place in places:
            if place is not None:
                self._refuse_random(place)
        return func(
            args[0], *map(own, args[1:]), **{key: own(value) for key, value in kwargs.items()}
        )

    def _refuse_random(self, place: Place) -> None:
        layout = self._mesh.layout
        if self._drew and layout.tp * layout.pp * layout.ep > 1:
            raise ConfigError(
                f"{self._hook} draws random numbers and writes '{place.name}'. In {layout}, ranks"
                " have other parameters or shards, so they would draw other numbers than one"
                " process. Use tp = 1, pp = 1 and ep = 1."
            )

    def _own_part(self, value: Any, place: Place) -> Any:
        """This rank's part of what is written to a parameter."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._own_part(item, place) for item in value)
        if isinstance(value, dict):
            return {key: self._own_part(item, place) for key, item in value.items()}
        if not isinstance(value, Tensor):
            return value
        other = self._places.get(id(value))
        if (
            other is not None
            and other.spec.boxes == place.spec.boxes
            and other.spec.global_shape == place.spec.global_shape
        ):
            return value
        value = self._whole(value)
        fits = place.spec.is_cut and tuple(value.shape) == tuple(place.spec.global_shape)
        return place.spec.cut(value) if fits else value


def gathered_in_hook(shard: Tensor, spec: ShardSpec, mesh: Mesh, reads: str) -> Tensor:
    """Gather a parameter or a gradient that a hook reads. Collective over the tensor-parallel
    ranks.

    Args:
        reads: what reads what, for a message.

    Raises:
        ConfigError: other ranks do not read it.
    """
    try:
        return gather_shards(shard.detach(), spec, mesh.group("tp"), mesh.index("tp"), _PATIENCE)
    except RuntimeError as error:
        raise ConfigError(
            f"{reads}, of which tensor-parallel ranks have shards, on some ranks only. Read it on"
            f" all ranks, before a condition such as `if self.trainer.is_global_zero` ({error})."
        ) from None


class _NoWrites(TorchFunctionMode):
    """Refuses writes to parameters in a hook that one process calls between forward and backward.
    Here both have run, so the gradients would be others.

    Args:
        root: the user's module.
        hook: name of the hook.
    """

    def __init__(self, root: nn.Module, hook: str) -> None:
        super().__init__()
        self._hook = hook
        # a new value that is under way is not waited for
        with torch._C.DisableTorchFunctionSubclass():
            self._names = {
                p.untyped_storage().data_ptr(): name
                for name, p in root.named_parameters()
                if p.requires_grad
            }

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = with_target_first(args, kwargs)
        if (
            changes_in_place(func, kwargs)
            and args
            and (func.__name__ != "__set__" or func == _SET_DATA)
        ):
            for target in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                name = (
                    self._names.get(target.untyped_storage().data_ptr())
                    if type(target) in (Tensor, nn.Parameter)
                    else None
                )
                if name is not None:
                    self._refuse(name)
        return func(*args, **kwargs)

    def _refuse(self, name: str) -> NoReturn:
        raise ConfigError(
            f"{self._hook} writes to the parameter '{name}'. One process calls this hook between"
            " the forward and the backward of a step, so that its gradients mix the weights before"
            " and after the write. Here the forward and backward of all micro-batches run first,"
            " and the gradients would be others. Write weights in on_train_batch_end or"
            " on_train_batch_start."
        )


def _shares_memory(view: Tensor, full: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
