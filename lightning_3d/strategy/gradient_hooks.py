"""The user's hooks between backward and optimizer step: which of them read or change gradients, and
whether this rank has these."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import inf
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_3d.compat.lightning import hooks_of_user, replacing_grad_norm
from lightning_3d.compat.torch import replacing_total_norm
from lightning_3d.engine.step.elementwise import RANDOM, base_name, is_elementwise
from lightning_3d.engine.step.outside_reads import is_blank
from lightning_3d.errors import ConfigError
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.partial_tensors import OF_THE_PART, OF_THE_WHOLE, changes_in_place
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.zero import DataParallelBackend
from lightning_3d.strategy.hook_reads import gathered_in_hook

WATCHED = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
)
WRITERS = (
    *WATCHED,
    "optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_start",
    "on_train_batch_end",
)
"""Hooks in which users write gradients, weights or buffers."""

_READ: Any = vars(torch._C.TensorBase)["grad"].__get__
_WRITE: Any = vars(torch._C.TensorBase)["grad"].__set__
_CLIP = (
    "To clip gradients, set Trainer(gradient_clip_val=...) or call self.clip_gradients(optimizer,"
    ' gradient_clip_val=..., gradient_clip_algorithm="norm") in configure_gradient_clipping. The'
    " gradient norm of the whole model is self.trainer.strategy.last_step.grad_norm."
)


@dataclass(frozen=True)
class _Place:
    """A trained parameter and its shard."""

    name: str
    spec: ShardSpec
    parameter: Tensor


class GradientHooks(TorchFunctionMode):
    """Sees the functions of torch that the user's gradient hooks call. Without such hooks, and
    where every rank has all gradients in `.grad`, every context is empty.

    Args:
        module: the user's module.
        mesh: process groups.
        specs: shards of this rank's parameters.
        backend: owner of the gradients.
        zero: options of the backend.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: Mesh,
        specs: dict[str, ShardSpec],
        backend: DataParallelBackend,
        zero: ZeroOptions,
    ) -> None:
        super().__init__()
        self._module, self._mesh, self._specs, self._backend, self._zero = (
            module,
            mesh,
            specs,
            backend,
            zero,
        )
        self._places: dict[int, _Place] = {}
        # by `id`, of tensors that are alive
        self._gradients: dict[int, tuple[weakref.ref[Tensor], _Place]] = {}
        self._drew = self._own = False
        self._changes: bool | None = None

    @property
    def names(self) -> list[str]:
        """The user's hooks that may write gradients, weights or buffers, as "Class.hook". The same
        on all ranks."""
        return hooks_of_user(self._module.trainer, WRITERS)

    def begin_fit(self) -> None:
        """Expect a fit, with hooks of its own."""
        self._changes = None

    @property
    def change_gradients(self) -> bool:
        """Whether the user has hooks that may change gradients before they are clipped. The same on
        all ranks."""
        if self._changes is None:
            self._changes = bool(hooks_of_user(self._module.trainer, WATCHED))
        return self._changes

    def watching(self) -> AbstractContextManager[None]:
        """Context of hooks between backward and optimizer step."""
        if not self.change_gradients:
            return nullcontext()
        trained = [(name, p) for name, p in self._module.named_parameters() if name in self._specs]
        self._places = {
            id(p): _Place(name, self._specs[name], p)
            for name, p in trained
            if self._backend.trains(p)
        }
        everything_here = not self._is_sharded and all(
            self._backend.shows_gradient(place.parameter) for place in self._places.values()
        )
        return nullcontext() if everything_here and self._zero.stage == 0 else self._active()

    @property
    def _is_sharded(self) -> bool:
        layout = self._mesh.layout
        return layout.tp * layout.pp * layout.ep > 1

    @contextmanager
    def _active(self) -> Iterator[None]:
        self._drew = False
        try:
            with replacing_total_norm(self._total_norm), replacing_grad_norm(self._norms), self:
                yield
        finally:
            self._gradients.clear()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._own or func in OF_THE_WHOLE or func in OF_THE_PART:
            return func(*args, **kwargs)
        self._drew = self._drew or base_name(func) in RANDOM
        found = self._places_in([args, kwargs])
        caller = _caller() if found else None
        if not found or caller is None:
            return func(*args, **kwargs)
        place, where = found[0], getattr(caller.f_code, "co_qualname", caller.f_code.co_name)
        if func in (_READ, _WRITE) and id(args[0]) in self._places:
            return self._answer(func, args, place, where)
        if is_blank(place.parameter):
            raise ConfigError(
                f"{where} reads the parameter '{place.name}', whose values are on several ranks"
                " between batches (zero_stage=3). Use zero_stage=2."
            )
        return self._apply(func, args, kwargs, place, caller)

    def _answer(self, func: Any, args: tuple[Any, ...], place: _Place, where: str) -> Any:
        """Read or replace `.grad` of a parameter."""
        if not self._backend.shows_gradient(place.parameter):
            raise ConfigError(
                f"{where} {'reads' if func == _READ else 'replaces'} the gradient of"
                f" '{place.name}', but with {self._apart(place)} the reduced gradient is not in"
                f" .grad: reading gives None, and a change has no effect. {_CLIP} For masks and"
                ' others, use zero_stage=0 with precision="32-true".'
            )
        if func == _WRITE and self._zero.stage > 0:
            raise ConfigError(
                f"{where} replaces the gradient of '{place.name}'. With"
                f" zero_stage={self._zero.stage} the optimizer steps with the memory that .grad"
                " shows now, so the change would have no effect. Write in place"
                " (p.grad.mul_(mask), p.grad.copy_(value)), or use zero_stage=0."
            )
        gradient = func(*args)
        if func == _READ and gradient is not None:
            self._note(gradient, place)
        return gradient

    def _note(self, gradient: Tensor, place: _Place) -> None:
        """Remember what a gradient, or what was computed from one, belongs to, for as long as the
        user keeps it."""
        key = id(gradient)
        self._gradients[key] = (
            weakref.ref(gradient, lambda _: self._gradients.pop(key, None) and None),
            place,
        )

    def _apart(self, place: _Place) -> str:
        return (
            f"precision {place.parameter.dtype}".replace("torch.", "")
            if self._zero.stage == 0
            else f"zero_stage={self._zero.stage}"
        )

    def _apply(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: _Place, caller: Any
    ) -> Any:
        """Call a function on a gradient, or on what was computed from one element by element."""
        if not self._is_sharded:
            return func(*args, **kwargs)
        where = getattr(caller.f_code, "co_qualname", caller.f_code.co_name)
        writes = changes_in_place(func, kwargs)
        if self._drew and writes:
            raise ConfigError(
                f"{where} draws random numbers for the gradient of '{place.name}'. In"
                f" {self._mesh.layout} ranks have other parameters or shards, so they would draw"
                " other numbers than one process, and copies would differ. Use tp = 1, pp = 1 and"
                " ep = 1."
            )
        spec = place.spec
        local, whole = tuple(place.parameter.shape), tuple(spec.global_shape)

        def own(value: Any) -> Any:
            """This rank's part of a mask for the whole parameter."""
            if isinstance(value, (list, tuple)):
                return type(value)(own(item) for item in value)
            fits = isinstance(value, Tensor) and tuple(value.shape) == whole != local
            return spec.cut(value) if fits else value

        if func.__name__.startswith("_foreach_"):
            alike = func.__name__.endswith("_") and is_elementwise(func, None, args[1:], kwargs)
            if alike:
                return func(*args, **kwargs)
        else:
            first, target = next(
                (pair for pair in enumerate(args) if isinstance(pair[1], Tensor)), (0, None)
            )
            args, kwargs = own(tuple(args)), {key: own(value) for key, value in kwargs.items()}
            if is_elementwise(func, target, args[first + 1 :], kwargs):
                result = func(*args, **kwargs)
                if isinstance(result, Tensor):
                    self._note(result, place)
                return result
        is_whole = not spec.is_cut and not spec.expert
        if is_whole and (writes or self._mesh.layout.pp == 1):
            return func(*args, **kwargs)
        if not writes and self._mesh.layout.pp == 1 and not spec.expert:
            with self._unseen():
                return func(*self._whole(args, where), **self._whole(kwargs, where))
        raise ConfigError(
            f"{where} computes {func.__name__} of the gradient of '{place.name}', of which this"
            f" rank has {local} of {whole} in {self._mesh.layout}, and none of the parameters of"
            " other stages: ranks would get different numbers, and train different weights."
            f" {_CLIP} torch.nn.utils.clip_grad_norm_ counts all ranks, too."
        )

    def _whole(self, value: Any, where: str) -> Any:
        """The arguments with whole gradients in place of shards. Collective over the
        tensor-parallel ranks."""
        if isinstance(value, Tensor):
            known = self._gradients.get(id(value))
            if known is None or not known[1].spec.is_cut:
                return value
            return gathered_in_hook(
                value, known[1].spec, self._mesh, f"{where} reads the gradient of '{known[1].name}'"
            )
        if isinstance(value, (list, tuple)):
            items = [self._whole(item, where) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return (
            {key: self._whole(item, where) for key, item in value.items()}
            if isinstance(value, dict)
            else value
        )

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Context in which functions of torch are called as they are."""
        before, self._own = self._own, True
        try:
            yield
        finally:
            self._own = before

    def _places_in(self, value: Any) -> list[_Place]:
        """The parameter whose value or gradient is among the arguments, as a list of one; an empty
        list if there is none."""
        if isinstance(value, Tensor):
            known = self._gradients.get(id(value))
            place = known[1] if known is not None else self._places.get(id(value))
            return [] if place is None else [place]
        if isinstance(value, dict):
            value = list(value.values())
        if not isinstance(value, (list, tuple)):
            return []
        return next((found for item in value if (found := self._places_in(item))), [])

    def _total_norm(
        self, original: Any, tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Take the place of torch's norm of several tensors: of gradients, the norm over all ranks.
        Collective over the world.

        Args:
            original: torch's function.
        """
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        known = [
            self._gradients[id(tensor)][1] for tensor in tensors if id(tensor) in self._gradients
        ]
        with self._unseen():
            if not self._is_sharded or len(known) < len(tensors):
                return original(tensors, norm_type, *args, **kwargs)
            counted = [
                t
                for t, place in zip(tensors, known, strict=True)
                if self._backend.counts_gradient(place.parameter)
            ]
            return self._norm_over_ranks(counted, float(norm_type)).to(
                tensors[0].dtype if tensors else torch.get_default_dtype()
            )

    def _norms(
        self, original: Any, module: torch.nn.Module, norm_type: float | str, separator: str
    ) -> dict[str, Any]:
        """Take the place of Lightning's `grad_norm`: the norms of whole gradients, of all stages.
        Collective over the world.

        Args:
            original: Lightning's function.
        """
        if not self._is_sharded:
            return original(module, norm_type, separator)
        power, own = float(norm_type), {}
        with self._unseen():
            for name, parameter in module.named_parameters():
                place = self._places.get(id(parameter))
                gradient = (
                    self._answer(_READ, (parameter,), place, "grad_norm")
                    if place is not None
                    else None
                )
                if gradient is not None and self._backend.counts_gradient(parameter):
                    own[name] = float(
                        torch.linalg.vector_norm(gradient, power, dtype=torch.float64)
                    )
        parts: list[Any] = [None] * dist.get_world_size(self._backend.norm_group)
        dist.all_gather_object(parts, own, group=self._backend.norm_group)
        names = dict.fromkeys(name for part in parts for name in part)
        with self._unseen():
            of_ranks = {
                name: torch.tensor([part[name] for part in parts if name in part]) for name in names
            }
            norms = {
                f"grad_{power}_norm{separator}{name}": norms.norm(power)
                for name, norms in of_ranks.items()
            }
            return (
                norms | {f"grad_{power}_norm_total": torch.stack(list(norms.values())).norm(power)}
                if norms
                else norms
            )

    def _norm_over_ranks(self, gradients: Sequence[Tensor], power: float) -> Tensor:
        device = self._backend.device
        norms = [
            torch.linalg.vector_norm(gradient, power, dtype=torch.float64) for gradient in gradients
        ]
        parts = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
        total = parts.max() if power == inf else parts.pow(power).sum()
        dist.all_reduce(
            total,
            dist.ReduceOp.MAX if power == inf else dist.ReduceOp.SUM,
            group=self._backend.norm_group,
        )
        return total if power == inf else total.pow(1 / power)


def _caller() -> Any:
    """The frame that called torch, unless it is this package's, or this package runs a step: None
    then."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.", "functools")
    ):
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "") if frame is not None else ""
    return None if name.startswith("lightning_3d.") or _runs_step(frame) else frame


def _runs_step(frame: Any) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "") == "lightning_3d.engine.step.runner":
            return True
        frame = frame.f_back
    return False
