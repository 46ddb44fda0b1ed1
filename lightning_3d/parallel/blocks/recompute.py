"""Activation checkpointing: the results of a forward are not kept, but recomputed when the backward
needs them.

This is torch's non-reentrant checkpoint. It stops recomputing as soon as it has what the backward
needs, so it does not repeat the all-reduce at the end of a tensor-parallel block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_3d.compat.torch import functional_collectives, kept_collectives, recomputed
from lightning_3d.errors import ConfigError, did_you_mean
from lightning_3d.parallel.blocks.kept_results import KeptResults
from lightning_3d.parallel.blocks.unseen_writes import UnseenWrites
from lightning_3d.parallel.default_dtype import default_dtype

EXPENSIVE = (
    "mm",
    "addmm",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
"""Operators whose results are kept by default: products with weights, and fused attention.
Everything else in a block, such as norms, activations, rotation, and the scores of attention
without a fused kernel (`bmm`), is cheap to recompute for the bytes that it frees."""


Moment = Callable[[], Callable[[], AbstractContextManager[None]]]


class Recompute:
    """Runner of forwards that the backward will run again.

    Args:
        keep: overloads of operators whose results are kept instead of recomputed; None keeps no
            results.
        moment: function that is called before each forward, and returns a function that makes the
            context in which it runs again.
    """

    def __init__(self, keep: frozenset[Any] | None, moment: Moment | None = None) -> None:
        self._keep = keep | kept_collectives() if keep is not None else None
        self._moment = moment
        self._writes: WeakKeyDictionary[Any, UnseenWrites] = WeakKeyDictionary()

    @property
    def keeps(self) -> bool:
        """True if recomputation is selective."""
        return self._keep is not None

    def __call__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> Any:
        """Run `forward`, which is that of `module` where it has one."""
        block: Any = (
            None
            if torch.compiler.is_compiling()
            else module or getattr(forward, "__self__", forward)
        )
        if not torch.compiler.is_compiling():
            forward = repeating(forward, list(module.modules())) if module is not None else forward
            # Lightning's double precision sets the default type in the user's step only, not in the
            # backward that repeats the forward.
            forward = partial(_within, partial(default_dtype, torch.get_default_dtype()), forward)
            forward = (
                partial(_within, self._moment(), forward) if self._moment is not None else forward
            )
        if self._keep is None:
            return checkpoint(partial(_again, forward), *args, use_reentrant=False, **kwargs)
        run = partial(_with_functional_collectives, forward)
        if torch.compiler.is_compiling():  # torch's partitioner keeps only what the backward reads
            context = partial(create_selective_checkpoint_contexts, partial(_policy, self._keep))
            return checkpoint(run, *args, use_reentrant=False, context_fn=context, **kwargs)
        kept = KeptResults(
            partial(_keeps, self._keep), self._writes.setdefault(block, UnseenWrites())
        )
        return checkpoint(
            kept.noting(run), *args, use_reentrant=False, context_fn=kept.contexts, **kwargs
        )


def _within(
    context: Callable[[], AbstractContextManager[None]],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    with context():
        return forward(*args, **kwargs)


def _with_functional_collectives(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    with functional_collectives(), recomputed():
        return forward(*args, **kwargs)


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with recomputed():
        return forward(*args, **kwargs)


def _policy(
    keep: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if _keeps(keep, operator, args, kwargs)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _keeps(
    keep: frozenset[Any], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Keep the results of the chosen operators, except random ones, and those that write into an
    argument (`mm.out`), which would not be written again. If a random result were kept, the next
    random numbers would differ."""
    if operator not in keep:
        return False
    if not isinstance(operator, torch._ops.OpOverload):
        return True
    drawn = torch.Tag.nondeterministic_seeded in operator.tags and not _draws_nothing(
        operator, args, kwargs
    )
    return not drawn and not operator._schema.is_mutable


def _draws_nothing(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this is attention without dropout, which torch marks as random
    nevertheless."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            return not (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))
    return False


def expensive() -> frozenset[Any]:
    """Return the operators of `EXPENSIVE` that this version of torch has, and FlexAttention."""
    return operators(name for name in EXPENSIVE if _exists(name)) | {
        torch.ops.higher_order.flex_attention
    }


def operators(names: Iterable[str]) -> frozenset[Any]:
    """Find all overloads of the named ATen operators. A name may begin with "aten.".

    Raises:
        ConfigError: an operator does not exist.
    """
    found: set[Any] = set()
    for name in names:
        short = str(name).removeprefix("aten.").split(".")[0]
        if not _exists(short):
            raise ConfigError(
                f'recompute_keep names the operator "{name}", which ATen does not'
                f" have.{did_you_mean(short, _COMMON)} Examples:"
                f" {', '.join(_COMMON)}."
            )
        packet = getattr(torch.ops.aten, short)
        found |= {getattr(packet, overload) for overload in packet.overloads()}
    return frozenset(found)


_COMMON = (
    "mm",
    "addmm",
    "bmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_softmax",
    "silu",
)


def _exists(name: str) -> bool:
    try:
        return bool(getattr(torch.ops.aten, name).overloads())
    except AttributeError:
        return False


def attention_of(block: nn.Module) -> list[nn.Module]:
    """Find the attentions in a block: outermost submodules with "attn" or "attention" in their name
    that hold matrices in submodules."""
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for name, child in module.named_children():
            names_attention = "attn" in name.lower() or "attention" in name.lower()
            inside = [parameter for inner in child.children() for parameter in inner.parameters()]
            if names_attention and any(parameter.ndim > 1 for parameter in inside):
                found.append(child)
            else:
                look(child)

    look(block)
    return found


def parts_of(block: nn.Module, exchanging: Collection[nn.Module]) -> list[nn.Module]:
    """Find the outermost modules in a block that contain none of `exchanging`, whose messages a
    recomputation would send again."""
    if not any(module in exchanging for module in block.modules()):
        return [block]
    if block in exchanging:
        return []
    children = list(block.children())
    return [
        part
        for child in children
        for part in parts_of(child, exchanging)
        if any(True for _ in part.parameters())
    ]


# State of a block that a recomputation must see again: the code around the first forward may have
# changed it for that call only.

_PLAIN = frozenset({bool, int, float, str, type(None)})
_LISTS = (list, tuple)
_HOLDERS = ("_parameters", "_buffers")


class SeenState:
    """Parameters, buffers and plain attributes of modules, as they are now.

    Args:
        modules: the block and everything in it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._tensors = [
            (holder, dict(holder))
            for module in modules
            for key in _HOLDERS
            if (holder := vars(module)[key])
        ]
        self._plain = [(vars(module), _plain_values(module)) for module in modules]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which the modules have this state. What they had before, they have afterwards:
        a counter counts one call."""
        before = SeenState(self._modules)
        self._put()
        try:
            yield
        finally:
            before._put()

    def _put(self) -> None:
        for place, seen in self._tensors:
            for key, value in seen.items():
                if key in place and place[key] is not value:
                    place[key] = value
        for place, seen in self._plain:
            for key, value in seen.items():
                if place.get(key, value) is not value and _is_plain(place[key]):
                    place[key] = value


def repeating(forward: Callable[..., Any], modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """Return `forward` of some modules. When it runs again, they have the state in which it ran
    first."""
    seen: list[SeenState] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not seen:
            seen.append(SeenState(modules))
            return forward(*args, **kwargs)
        with seen[0].again():
            return forward(*args, **kwargs)

    return run


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """Collect the plain attributes of a module. Blocks do this several times a micro-batch, so most
    attributes cost no call."""
    found = vars(module).items()
    return {
        key: value
        for key, value in found
        if type(value) in _PLAIN or (type(value) in _LISTS and _is_plain(value))
    }


def _is_plain(value: Any) -> bool:
    """Return whether a value is a flag, a number, a name or some names. Tensors in attributes would
    be kept in memory."""
    return type(value) in _PLAIN or (
        type(value) in _LISTS and all(type(item) is str for item in value)
    )
