"""Hooks of the user on gradients of parameters (`register_hook`,
`register_post_accumulate_grad_hook`).

One process calls them with the whole gradient of a batch. A rank's backward has only a part of it:
a micro-batch, some rows, a shard. So autograd calls nothing. Once a step, when the gradients are
reduced, every rank that has a part of a parameter gives the whole gradient to the hooks, and keeps
its part of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.compat.torch import accumulation_hooks, gradient_hooks, has_gradient_hooks
from lightning_3d.compat.torch_fake import is_fake
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.sharding import OptimizerShard
from lightning_3d.parallel.zero.gradients import sum_dtype
from lightning_3d.parallel.zero.stepper import Stepper
from lightning_3d.parallel.zero.trained import Trained, TrainedParameters

Pieces = list[tuple[int | None, Tensor]]
"""This rank's pieces of a shard: each with the element of the flattened shard that it begins with;
None if it is the whole shard."""

_KINDS = (gradient_hooks, accumulation_hooks)

_PACKAGE = f"{__name__.partition('.')[0]}."


class _Deferred:
    """A hook of the user, in the place where autograd looks for it."""

    def __init__(self, hook: Callable[..., Any], owner: UserHooks) -> None:
        self.hook, self._owner = hook, owner

    def __call__(self, *args: Any) -> Any:
        return None if self._owner.deferring else self.hook(*args)


@dataclass(frozen=True)
class _Agreed:
    """What all ranks know of a parameter with hooks.

    Attributes:
        everywhere: every rank with a part of the parameter has as many hooks.
        needs_values: some hook is given the parameter, not its gradient.
    """

    everywhere: bool
    needs_values: bool


class UserHooks:
    """Finds hooks on the gradients of a rank's parameters, and calls them once a step.

    Args:
        trained: the parameters that the optimizer trains.
        untrained: all others, by name.
        stage: ZeRO stage.
        values: function that returns this rank's pieces of the parameters that ZeRO 3 shards.

    Attributes:
        deferring: whether autograd's calls are left out.
    """

    def __init__(
        self,
        trained: TrainedParameters,
        untrained: dict[str, nn.Parameter],
        stage: int,
        values: Callable[[], list[OptimizerShard]],
    ) -> None:
        self._trained, self._untrained, self._stage, self._values = (
            trained,
            untrained,
            stage,
            values,
        )
        self._agreed: dict[str, _Agreed] | None = None
        self.deferring = False

    @contextmanager
    def deferred(self, *, alone: bool) -> Iterator[None]:
        """Context of the forward and backward of a batch, in which autograd calls no hooks that
        were found.

        Args:
            alone: whether the batch is the only one of its optimizer step.

        Raises:
            ConfigError: the batch is not alone, and there are hooks.
        """
        if self._agreed and not alone:
            raise ConfigError(
                f"'{next(iter(self._agreed))}' has a hook on its gradient, which one process calls"
                " after each of the accumulated batches. Use accumulate_grad_batches=1 and larger"
                " batches: the strategy splits each batch into micro-batches anyway."
            )
        self.deferring = True
        try:
            yield
        finally:
            self.deferring = False

    @torch.no_grad()
    def call(self, stepper: Stepper, absent: Sequence[nn.Parameter]) -> None:
        """Give reduced gradients to the hooks, those of the last layers first, and take the
        results. Collective.

        Args:
            stepper: has the gradients.
            absent: parameters that no data-parallel rank has a gradient for.
        """
        if self._agreed is not None:
            self.find()
        if not self._agreed or any(is_fake(parameter) for parameter in self._trained.parameters):
            return
        missing = {id(parameter) for parameter in absent}
        pieces: dict[str, Pieces] = {name: [] for name in self._agreed}
        for entry, first, gradient in stepper.gradient_pieces():
            if entry.name in pieces and gradient is not None and id(entry.parameter) not in missing:
                pieces[entry.name].append((first, gradient))
        for entry in self._in_backward_order():
            agreed = self._agreed[entry.name]
            whole = self._whole(
                entry,
                pieces[entry.name],
                sum_dtype(entry.parameter),
                present=id(entry.parameter) not in missing,
            )
            if whole is not None:
                self._put(entry, pieces[entry.name], self._through_hooks(entry, agreed, whole))

    def find(self) -> None:
        """Take note of the hooks that have been registered since the last call. The first one is
        collective.

        Raises:
            ConfigError: hooks that cannot be called as one process calls them.
        """
        # mostly none, and each step asks
        hooked = [entry for entry in self._trained.entries if has_gradient_hooks(entry.parameter)]
        found = {
            entry.name: counts
            for entry in hooked
            if any(counts := self._take_over(entry.parameter))
        }
        if self._agreed is None:
            self._agreed = self._agree(found)
        elif new := found.keys() - self._agreed.keys():
            raise ConfigError(
                f"A hook on the gradient of '{min(new)}' was registered after the first step had"
                " begun. Register it before, in configure_model, configure_optimizers or"
                " on_train_start for example. A hook may return its argument."
            )

    def _take_over(self, parameter: nn.Parameter) -> list[int]:
        """Defer the hooks of a parameter. Returns how many of each kind are new."""
        counts = []
        for kind in _KINDS:
            hooks = kind(parameter)
            new = {key: _hook_of(hook) for key, hook in hooks.items() if self._is_new(hook)}
            hooks.update({key: _Deferred(hook, self) for key, hook in new.items()})
            counts.append(len(new))
        return counts

    def _is_new(self, hook: Any) -> bool:
        if isinstance(hook, _Deferred):
            return self._agreed is None  # of an earlier fit
        return not str(getattr(hook, "__module__", "")).startswith(_PACKAGE)

    def _agree(self, found: dict[str, list[int]]) -> dict[str, _Agreed]:
        """Return the parameters with hooks on any rank, in one order."""
        mesh = self._trained.mesh
        untrained = [
            name
            for name, parameter in self._untrained.items()
            if parameter.requires_grad and has_gradient_hooks(parameter)
        ]
        count = torch.tensor(len(found) + len(untrained))
        if mesh.layout.world_size > 1:
            dist.all_reduce(count, dist.ReduceOp.MAX, group=mesh.world_control)
        if int(count) == 0:
            return {}
        parts: list[Any] = [({entry.name for entry in self._trained.entries}, found, untrained)]
        if mesh.layout.world_size > 1 and not any(
            is_fake(parameter) for parameter in self._trained.parameters
        ):
            own = parts[0]
            parts = [None] * mesh.layout.world_size
            dist.all_gather_object(parts, own, group=mesh.world_control)
        if other := sorted(name for _, _, names in parts for name in names):
            raise ConfigError(
                f"'{other[0]}' has a hook on its gradient, but the optimizer does not train it, so"
                " the hook would see gradients of micro-batches. Remove the hook, or set"
                " requires_grad=False."
            )
        agreed = {}
        for name in sorted({name for _, counts, _ in parts for name in counts}):
            counts = [
                tuple(counts.get(name, (0, 0))) for names, counts, _ in parts if name in names
            ]
            agreed[name] = _Agreed(
                len(set(counts)) == 1, any(accumulated for _, accumulated in counts)
            )
        return agreed

    def _in_backward_order(self) -> list[Trained]:
        """Parameters with hooks, in an order that is the same on all ranks of a stage."""
        entries = {
            id(entry.parameter): entry
            for entry in self._trained.entries
            if entry.name in (self._agreed or {})
        }
        stages = reversed(self._trained.stages)
        ordered = [
            entries.pop(id(parameter))
            for stage in stages
            for parameter in reversed(stage)
            if id(parameter) in entries
        ]
        return [*ordered, *entries.values()]

    def _through_hooks(self, entry: Trained, agreed: _Agreed, whole: Tensor) -> Tensor:
        """Return what the hooks make of a whole gradient."""
        several = self._trained.mesh.layout.world_size > 1
        before = whole if agreed.everywhere else whole.clone()
        states = _random_states() if several else []
        for hook in _deferred(gradient_hooks(entry.parameter)):
            result = hook(whole)
            whole = whole if result is None else _checked(entry, result, whole)
        if agreed.needs_values:
            whole = self._accumulated(entry, whole)
        if several and not all(map(torch.equal, states, _random_states())):
            raise ConfigError(
                f"A hook on the gradient of '{entry.name}' draws random numbers, which differ"
                " between ranks. Draw them from a torch.Generator of your own that has the same"
                " seed on all ranks."
            )
        if not agreed.everywhere and not torch.equal(before, whole):
            raise ConfigError(
                f"A hook that only some ranks have changes the gradient of '{entry.name}'. Register"
                " it on every rank."
            )
        return whole

    def _accumulated(self, entry: Trained, whole: Tensor) -> Tensor:
        """Call the hooks that get a parameter, with its whole values and gradient."""
        parameter = entry.parameter
        values = parameter.detach()
        pieces: Pieces = [(None, values)]
        if self._stage == 3:
            pieces = [
                (shard.start, shard.values["weight"])  # type: ignore[misc]
                for shard in self._values()
                if shard.name == entry.name
            ]
        whole_values = self._whole(entry, pieces, parameter.dtype, present=True)
        assert whole_values is not None
        gradient = parameter.grad
        parameter.grad = None
        parameter.data = whole_values
        parameter.grad = whole.to(parameter.dtype)
        version = parameter._version
        try:
            for hook in _deferred(accumulation_hooks(parameter)):
                hook(parameter)
            result, written = parameter.grad, parameter._version != version
        finally:
            parameter.grad = None
            parameter.data = values
            parameter.grad = gradient
        if result is None or written:
            raise ConfigError(
                f"A hook of '{entry.name}' steps an optimizer in the backward: it changes the"
                " parameter, or removes its gradient. The strategy runs the optimizer when all"
                " gradients are there. Remove the hook, and use zero_stage=1, 2 or 3 to save"
                " memory."
            )
        return _checked(entry, result, whole)

    def _whole(
        self, entry: Trained, pieces: Pieces, dtype: torch.dtype, *, present: bool
    ) -> Tensor | None:
        """Put a whole tensor together from the pieces of all ranks. Collective over the ranks that
        have some, if it is sharded.

        Args:
            present: whether there is a tensor; all ranks that share the shard agree.

        Returns:
            None if there is none anywhere.
        """
        mesh, spec, device = self._trained.mesh, entry.spec, self._trained.device
        local = torch.zeros(entry.spec.local_shape, dtype=dtype, device=device)
        for first, piece in pieces:
            start = first or 0
            local.view(-1)[start : start + piece.numel()] = piece.reshape(-1)
        if self._stage > 0 and present and not (pieces and pieces[0][0] is None):
            dist.all_reduce(
                local, group=self._trained.expert_shard_group if spec.expert else mesh.shard_group
            )
        if not spec.is_cut:
            return local if present else None
        whole = torch.zeros(spec.global_shape, dtype=dtype, device=device)
        count = torch.tensor([float(present)], device=device)
        if spec.expert or mesh.index("tp") == min(spec.tp_replicas):
            spec.paste(local, whole)
        group = mesh.expert_group if spec.expert else mesh.group("tp")
        dist.all_reduce(whole, group=group)
        dist.all_reduce(count, group=group)
        return whole if float(count) > 0 else None

    def _put(self, entry: Trained, pieces: Pieces, whole: Tensor) -> None:
        """Write this rank's pieces of a gradient."""
        shard = entry.spec.cut(whole) if entry.spec.is_cut else whole
        flat = shard.reshape(-1)
        for first, piece in pieces:
            start = first or 0
            piece.copy_(flat[start : start + piece.numel()].view(piece.shape))


def _hook_of(hook: Any) -> Callable[..., Any]:
    return hook.hook if isinstance(hook, _Deferred) else hook


def _deferred(hooks: dict[int, Callable[..., Any]]) -> list[Callable[..., Any]]:
    return [hook.hook for hook in hooks.values() if isinstance(hook, _Deferred)]


def _checked(entry: Trained, result: Any, whole: Tensor) -> Tensor:
    """Return the result of a hook in the type of gradients."""
    if not isinstance(result, Tensor) or result.shape != whole.shape:
        got = (
            f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        )
        raise ConfigError(
            f"A hook on the gradient of '{entry.name}' must return a tensor of shape"
            f" {tuple(whole.shape)}, as it gets; it returned {got}."
        )
    return result.detach().to(whole.dtype)


def _random_states() -> list[Tensor]:
    """States of the generators that hooks draw from by default."""
    return [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []),
    ]
