"""Parameters of the parallel model that the user's step reads outside of the model's own call:
penalties, a head's weight, averages.

A rank has only its part of them. Tensor-parallel ranks gather what is read, so that a step sees the
whole parameter. Where only other ranks know a parameter, the step is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_3d.compat.torch import autograd_is_running, innermost_function_mode
from lightning_3d.engine.local_model import LocalModel
from lightning_3d.engine.step.elementwise import is_elementwise
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.partial_tensors import (
    OF_THE_PART,
    OF_THE_WHOLE,
    changes_in_place,
    with_target_first,
)
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.tensor import whole

HARMLESS = {
    *OF_THE_WHOLE,
    *OF_THE_PART,
    *(
        getattr(Tensor, name).__get__
        for name in ("_version", "is_nested", "output_nr", "retains_grad", "_backward_hooks")
    ),
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.data_ptr,
    Tensor.__hash__,
}
"""Functions that read no values."""

DATA: Any = vars(torch._C.TensorBase)["data"].__get__
GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__
_GRADIENTS = (GRADIENT, torch.autograd.grad, torch.autograd.backward)
_PACKAGE = "lightning_3d."
_INSTEAD = (
    "For an L2 penalty, use weight_decay of the optimizer. Call an output head as a module in the"
    " model's forward. For weights of an earlier step, use lightning's weight averaging or a frozen"
    " copy of the model."
)


@dataclass(frozen=True)
class Place:
    """A parameter that this rank does not hold as one process does.

    Attributes:
        name: full name.
        spec: its shard.
        of_model: whether it belongs to the pipelined module.
    """

    name: str
    spec: ShardSpec
    of_model: bool


class OutsideReads(TorchFunctionMode):
    """Sees the functions of torch that the user's step calls outside of models. The mode is left
    while a model runs, so it costs a step only some microseconds.

    Args:
        root: the user's module.
        parts: this rank's part of the model.
        mesh: process groups.
        zero_stage: what data-parallel ranks shard.
    """

    def __init__(self, root: nn.Module, parts: LocalModel, mesh: Mesh, *, zero_stage: int) -> None:
        super().__init__()
        self._root, self._parts, self._mesh, self._zero3 = root, parts, mesh, zero_stage == 3
        self._shards_states = zero_stage > 0 or mesh.layout.tp * mesh.layout.pp * mesh.layout.ep > 1
        self._places: dict[int, Place] = {}
        self._models: set[int] = set()
        self._views: list[Tensor] = []  # of parameters, made in the step that runs
        self._hooks: list[RemovableHandle] = []
        self._depth = 0
        self._left = self._gathered = False
        self._own: set[int] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> OutsideReads:
        """Share this object: a copied module has its hooks."""
        return self

    def begin(self) -> None:
        """Begin a fit, whose parameters are the ones that are there now."""
        self.end()
        layout, prefix = self._mesh.layout, f"{self._parts.name}." if self._parts.name else ""
        if layout.tp * layout.pp * layout.ep == 1 and not self._zero3:
            return
        self._own = {id(parameter) for parameter in self._root.parameters()}
        for name, parameter in self._root.named_parameters():
            spec = self._parts.specs.get(name)
            of_model = name.startswith(prefix)
            if spec is not None and (
                self._zero3 or self._is_elsewhere(spec, layout, of_model=of_model)
            ):
                self._places[id(parameter)] = Place(name, spec, of_model)
        if self._places:
            self._watch_models(prefix)

    @staticmethod
    def _is_elsewhere(spec: ShardSpec, layout: Layout, *, of_model: bool) -> bool:
        """Whether other ranks have a part of a parameter, of its gradient or of the model that it
        is read with."""
        return (
            spec.is_cut or spec.expert or len(spec.tp_grad_sum) > 1 or (of_model and layout.pp > 1)
        )

    def _watch_models(self, prefix: str) -> None:
        """Hook into the calls of models: of the pipelined module, and of the outermost modules
        around it that have such parameters."""
        found = {self._parts.module}
        names = (place.name for place in self._places.values() if not place.of_model)
        for name in names:
            found.add(self._outermost(name, prefix))
        for model in found:
            self._models |= {id(module) for module in model.modules()}
            self._hooks.append(model.register_forward_pre_hook(self._enter_model, prepend=True))
            self._hooks.append(model.register_forward_hook(self._leave_model, always_call=True))

    def _outermost(self, name: str, prefix: str) -> nn.Module:
        """The outermost module with the parameter `name` that a step can call: not the root, no
        list, not one around the pipelined one."""
        module = self._root
        for part in name.split(".")[:-1]:
            module = getattr(module, part)
            around = any(inner is self._parts.module for inner in module.modules())
            if not around and type(module).forward is not nn.Module.forward:
                return module
        return module

    def end(self) -> None:
        """End a fit."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._places.clear()
        self._models.clear()

    # Where

    def watching(self) -> AbstractContextManager[None]:
        """Context of one call of the user's step."""
        return self._active() if self._places else nullcontext()

    @contextmanager
    def _active(self) -> Iterator[None]:
        self._depth = 0
        self._left = self._gathered = False
        self.__enter__()
        try:
            yield
        finally:
            for view in self._views:
                del self._places[id(view)]
            self._views.clear()
            # else a model has failed, or ended the step, while the mode was left
            if not self._left:
                self.__exit__(None, None, None)
            self._left = False

    def _enter_model(self, *args: Any) -> None:
        """A model is called: leave the mode, if it can be left here, because no mode of the user's
        is inside it."""
        self._depth += 1
        if self._gathered:
            self._require_own_parameters(args[0])
        if self._depth == 1 and innermost_function_mode() is self:
            self.__exit__(None, None, None)
            self._left = True

    def _require_own_parameters(self, model: nn.Module) -> None:
        """Refuse a call of the model with tensors that were computed from whole parameters
        (`torch.func.functional_call`)."""
        if model is not self._parts.module:
            return
        for name, value in model.named_parameters():
            if id(value) not in self._own:
                raise ConfigError(
                    f"The step calls {type(model).__name__} with another tensor in the place of"
                    f" '{name}', which it has computed from parameters outside of the model"
                    f" (torch.func.functional_call). With tp = {self._mesh.size('tp')}, the step"
                    " reads whole parameters and the model needs shards. Change the weights inside"
                    " the modules' forward, for example with torch.nn.utils.parametrize, or use a"
                    " layout with tp = 1."
                )

    def _leave_model(self, *args: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._left:
            self._left = False
            self.__enter__()

    # What

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = with_target_first(args, kwargs)
        if (
            func is torch.autograd.grad
            and not self._depth
            and not self._is_inside(sys._getframe(1))
        ):
            self._refuse_double_backward(kwargs)
        # A backward in the step runs recomputed blocks. The functions that they call belong to the
        # model.
        if (
            self._depth
            or not self._reads([args, kwargs])
            or getattr(func, "__wrapped__", func) in HARMLESS
            or autograd_is_running()
        ):
            return func(*args, **kwargs)
        if self._is_inside(sys._getframe(1)):
            return func(*args, **kwargs)
        self._refuse([args, kwargs], gradient=func in _GRADIENTS)
        target = args[0] if args and isinstance(args[0], Tensor) else None
        place = self._places.get(id(target))
        if func == DATA and place is not None:
            view = func(*args, **kwargs)
            self._places[id(view)] = place
            self._views.append(view)
            return view
        written = place if changes_in_place(func, kwargs) else None
        if written is None:
            return func(*self._whole(args), **self._whole(kwargs))
        if not written.spec.is_cut or is_elementwise(func, target, args[1:], kwargs):
            return func(*args, **kwargs)
        raise ConfigError(
            f"The step writes to '{written.name}' by {func.__name__}, which is not the same on each"
            f" element, and this rank has a part of it ({_shapes(written)}). Write values that are"
            " of the shape of the parameter or single numbers, or use tp = 1."
        )

    def _refuse_double_backward(self, kwargs: dict[str, Any]) -> None:
        """Refuse gradients that the step computes through a model of which other ranks have
        parts."""
        layout = self._mesh.layout
        if layout.pp > 1 or (kwargs.get("create_graph") and layout.tp * layout.ep > 1):
            raise ConfigError(
                f"The step calls torch.autograd.grad. In {layout}, other ranks have parts of the"
                " model, and gradients through them are not known in the step (pp > 1), or have no"
                " gradients of their own (tp > 1). Gradient penalties are exact with tp = 1, pp ="
                f" 1 and ep = 1, for example dp{layout.world_size}."
            )

    def _reads(self, value: Any) -> bool:
        """Whether a watched parameter is among the arguments."""
        if isinstance(value, Tensor):
            return id(value) in self._places
        if isinstance(value, (list, tuple)):
            return any(map(self._reads, value))
        return isinstance(value, dict) and any(map(self._reads, value.values()))

    def _whole(self, value: Any) -> Any:
        """The arguments with whole parameters."""
        if isinstance(value, Tensor):
            place = self._places.get(id(value))
            if place is None or not (place.spec.is_cut or place.spec.tp_grad_sum):
                return value
            self._gathered = True
            return whole(value, place.spec, self._mesh.group("tp"), self._mesh.index("tp"))
        if isinstance(value, (list, tuple)):
            items = [self._whole(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return (
            {key: self._whole(item) for key, item in value.items()}
            if isinstance(value, dict)
            else value
        )

    def _is_inside(self, frame: Any) -> bool:
        """Whether a model, or this package, reads the parameter.

        Raises:
            ConfigError: the step runs a part of the pipelined module by itself.
        """
        package, piece = False, None
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            owner = frame.f_locals.get("self")
            if name == "lightning_3d.engine.step.runner":
                break
            if frame.f_code.co_name == "forward" and id(owner) in self._models:
                if owner is self._parts.module:
                    return True
                piece = owner
            package = package or (
                name.startswith(_PACKAGE) and name not in (__name__, type(self).__module__)
            )
            frame = frame.f_back
        if piece is not None:
            self._refuse_piece(piece)
            return True
        return package

    def _refuse_piece(self, piece: nn.Module) -> None:
        """Refuse a layer of the parallel model that the step runs by itself, if it needs the layers
        around it."""
        name = next(name for name, module in self._root.named_modules() if module is piece)
        prefix = f"{self._parts.name}." if self._parts.name else ""
        # What runs before the blocks has a whole output. Other stages than the first get it with
        # the hidden states, or NaN in its shape.
        if not name.startswith(prefix) or name.removeprefix(prefix) in self._parts.plan.before:
            return
        model, layout = type(self._parts.module).__name__, self._mesh.layout
        if layout.tp * layout.pp * layout.ep > 1:
            raise ConfigError(
                f"The step runs '{name}' by itself, outside of a call of {model}, whose layers are"
                f" sharded for {layout}. Its input, its output or its gradient would be those of a"
                f" part of the layer. Call {model} as a whole and let its forward run the layer"
                " (return hidden states from it where you need them), or use a layout with tp = 1,"
                f" pp = 1 and ep = 1, for example dp{layout.world_size}."
            )

    def _refuse(self, value: Any, *, gradient: bool) -> None:
        """Refuse to read a parameter that this rank cannot get."""
        if isinstance(value, Tensor):
            place = self._places.get(id(value))
            if place is not None:
                self._require(value, place, gradient=gradient)
        elif isinstance(value, (list, tuple, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                self._refuse(item, gradient=gradient)

    def _require(self, parameter: Tensor, place: Place, *, gradient: bool) -> None:
        layout, model = self._mesh.layout, type(self._parts.module).__name__
        if gradient:
            raise ConfigError(
                f"The step reads the gradient of the parameter '{place.name}'. In {layout} with"
                " ZeRO or shards, a rank has a part of it that is not reduced yet. Read gradients"
                " in on_before_optimizer_step, or use a layout with dp alone and zero_stage=0."
            )
        read = f"The step reads the parameter '{place.name}' outside of a call of {model}."
        if place.of_model and layout.pp > 1:
            raise ConfigError(
                f"{read} With pp = {layout.pp}, a rank has the parameters of its own stage alone,"
                " and the code after the call runs on the last stage alone: a penalty or a norm"
                f" would miss the rest of the model. {_INSTEAD} With pp = 1 such a step is exact,"
                f" for example tp{layout.tp * layout.pp}_dp{layout.dp}."
            )
        if place.spec.expert:
            raise ConfigError(
                f"{read} It belongs to experts that are on several ranks (ep = {layout.ep})."
                f" {_INSTEAD} With ep = 1 such a step is exact."
            )
        if is_blank(parameter):
            raise ConfigError(
                f"{read} With zero_stage=3 its values are on several ranks, and this rank has none"
                f" while no layer needs them. {_INSTEAD} With zero_gather=step (the parameters are"
                " whole during a step) or zero_stage=2 such a step is exact."
            )


def is_blank(parameter: Tensor) -> bool:
    """Whether the values of a parameter are away (ZeRO 3): a single NaN takes the place of all
    elements."""
    return parameter.numel() > 1 and not any(parameter.stride())


def _shapes(place: Place) -> str:
    return f"{tuple(place.spec.local_shape)} of {tuple(place.spec.global_shape)}"
