"""Megatron's sequence parallelism (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", arXiv:2205.05198, section 4.2.2): between its sharded layers a block works on a
part of the sequence.

    before the first block    this rank keeps its slice of the hidden states         backward: all-gather
    into an attention, MLP    the parts of all ranks are gathered                    backward: reduce-scatter
    out of it                 its row-parallel layer ends in a reduce-scatter        backward: all-gather
    behind the last block     hidden states are gathered                             backward: slice

Whatever is in a block and not sharded (norms, biases behind row-parallel layers, routers) sees a
part of its gradient on each rank; these are summed once a step. Everything outside the blocks sees
whole sequences: positions, masks, embeddings, the output head.
"""  # noqa: E501

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.compat.peft_layers import is_adapter
from lightning_3d.compat.torch import is_recomputed
from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import COLUMN_STYLES, ROW_STYLES, Cut, ParallelPlan
from lightning_3d.parallel.gloo_exchange import uses_gloo
from lightning_3d.parallel.random_streams import Stream
from lightning_3d.parallel.specialize import specialize
from lightning_3d.parallel.tensor.collectives import gather_tokens, part_of_tokens, scatter_tokens
from lightning_3d.parallel.tensor.group import TensorParallel

_BY_TOKEN = (nn.Linear, nn.Dropout, nn.Embedding)
"""Layers other than norms that treat every token separately."""


@dataclass(frozen=True)
class SequenceRegions:
    """Modules in which the blocks of a model work on more than this rank's part of the sequence.

    Attributes:
        layers: name of the list of blocks.
        parents: names of the modules that work on the whole sequence, attentions and MLPs.
        closed: those of them between whose layers tensors are whole on every rank (gather pairs).
        ends: names of the row-parallel layers.
        wholes: names of attentions that are not sharded and of mixtures whose experts are: their
            input is gathered, and the rest is theirs. A mixture whose experts are sharded over
            expert-parallel ranks works on this rank's tokens.
        ahead: number of blocks at the end of the list that run behind the model: each of them
            splits and gathers for itself.
    """

    layers: str
    parents: frozenset[str]
    closed: frozenset[str]
    ends: frozenset[str]
    wholes: frozenset[str]
    ahead: int = 0

    def has_partial_gradient(self, name: str) -> bool:
        """True if each rank sees a part of the gradient of the replicated parameter called
        `name`."""
        inside = name.startswith(f"{self.layers}.")
        whole = _within(name, self.wholes) or (
            _within(name, self.closed) and not _within(name, self.ends)
        )
        return inside and not whole


def pays_off(group: dist.ProcessGroup) -> bool:
    """True unless the ranks communicate through gloo, where sequence parallelism takes longer than
    it saves.

    On NCCL, an all-gather and a reduce-scatter together take as long as an all-reduce. On gloo, a
    message costs processor time whatever its size, because it wakes threads in both ranks; and a
    block needs ten messages for a forward and a backward pass, instead of four.
    """
    return not uses_gloo(group)


def _within(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def find_regions(module: nn.Module, plan: ParallelPlan, cuts: Mapping[str, Cut]) -> SequenceRegions:
    """Find the regions of the blocks of the whole `module`, on meta or not.

    Args:
        cuts: as `resolve` returns them.

    Raises:
        PlanError: the rest of a block may not process each token separately.
    """
    if not plan.layers:
        raise PlanError(
            "The plan has no 'pp' part with the blocks, so it is unknown where to split the"
            " sequence."
        )
    parents: dict[str, set[str]] = {}
    modules = dict(module.named_modules())
    mixtures = {
        name.rpartition(".")[0]: _is_expert_parallel(plan.cut_of(name))
        for name in plan.experts
        if name in modules
    }
    whole = [name for name, expert_parallel in mixtures.items() if not expert_parallel]
    layers = [
        name
        for name in cuts
        if name in modules and name.startswith(f"{plan.layers}.") and not _within(name, whole)
    ]
    for name in layers:
        cut = cuts[name]
        if cut.style in COLUMN_STYLES | ROW_STYLES:
            parents.setdefault(name.rpartition(".")[0], set()).add(cut.style)
    for parent, styles in parents.items():
        if parent.count(".") < plan.layers.count(".") + 2:
            raise PlanError(
                f"The block '{parent}' contains sharded layers directly, not inside an attention or"
                " MLP module."
            )
        if any(parent.startswith(f"{other}.") for other in parents):
            raise PlanError(f"'{parent}' is sharded, and so is a module that contains it.")
        if not styles & COLUMN_STYLES or not styles & ROW_STYLES:
            found = ", ".join(sorted(styles))
            raise PlanError(
                f"'{parent}' must have column-parallel and row-parallel layers; it has only"
                f" {found}."
            )
    blocks = module.get_submodule(plan.layers).named_children()
    wholes = {
        name
        for index, block in blocks
        for name in _mixing(f"{plan.layers}.{index}", block, frozenset(parents), mixtures)
    }
    closed = {
        parent
        for parent, styles in parents.items()
        if styles & COLUMN_STYLES <= {"colwise_gather_output"}
    }
    ends = {
        name
        for name, cut in cuts.items()
        if name.rpartition(".")[0] in parents and cut.style in ROW_STYLES
    }
    return SequenceRegions(
        plan.layers,
        frozenset(parents),
        frozenset(closed),
        frozenset(ends),
        frozenset(wholes),
        plan.ahead,
    )


def _is_expert_parallel(cut: Cut | None) -> bool:
    return cut is not None and cut.style == "ep_dispatch_experts"


def _mixing(
    name: str, module: nn.Module, parents: frozenset[str], mixtures: Mapping[str, bool]
) -> Iterator[str]:
    """Attentions that are not regions, and mixtures without expert parallelism.

    Args:
        mixtures: name -> True if its experts are sharded over ranks that send each other tokens.

    Raises:
        PlanError: another module with parameters that may mix tokens.
    """
    for child_name, child in module.named_children():
        inner = f"{name}.{child_name}"
        if inner in parents or next(child.parameters(), None) is None:
            continue
        if "Norm" in type(child).__name__ or isinstance(child, _BY_TOKEN) or is_adapter(child):
            continue
        if mixtures.get(inner):
            continue
        if any(parent.startswith(f"{inner}.") for parent in parents):
            yield from _mixing(inner, child, parents, mixtures)
            continue
        if inner in mixtures or "attention" in type(child).__name__.lower():
            yield inner
            continue
        raise PlanError(
            f"'{inner}' ({type(child).__name__}) is not sharded, and it is unknown whether it"
            " treats every token separately."
        )


def gather_regions(module: nn.Module, regions: SequenceRegions, context: TensorParallel) -> None:
    """Make the regions of the whole `module` gather the sequence, in place. Names, hooks and
    parameters stay."""
    for names, kind in ((regions.parents, GatheredRegion), (regions.wholes, WholeRegion)):
        for name in names:
            specialize(module.get_submodule(name), kind, tp_context=context)


def shard_sequence(module: nn.Module, regions: SequenceRegions, context: TensorParallel) -> None:
    """Make the first block of the whole `module` split the sequence and the last one gather it, in
    place; and each block behind them, which predicts a further token, do both."""
    specialize(module, SequenceModel)
    stream = None if context.random is None else context.random.outside("blocks")
    blocks = list(module.get_submodule(regions.layers).named_children())
    last = len(blocks) - regions.ahead - 1
    for index, (name, block) in enumerate(blocks):
        specialize(
            block,
            SequenceBlock,
            tp_context=context,
            tp_stream=stream,
            tp_is_first=index == 0 or index > last,
            tp_is_last=index >= last,
            tp_arguments=tuple(inspect.signature(block.forward).parameters),
            tp_names_inside=_names_inside(module, regions, f"{regions.layers}.{name}."),
        )


def _names_inside(module: nn.Module, regions: SequenceRegions, block: str) -> frozenset[str]:
    """Names of arguments of the modules in a block that see whole sequences: arguments of the block
    with these names are for them."""
    inside = [name for name in regions.parents | regions.wholes if name.startswith(block)]
    return frozenset(
        name
        for inner in inside
        for name in inspect.signature(module.get_submodule(inner).forward).parameters
    )


class SequenceModel:
    """Mixin for the model: refuses to return the hidden states between blocks, which are parts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "config", None)
        if kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False)):
            raise PlanError(
                "output_hidden_states=True would return parts of sequences. Use"
                " sequence_parallel=False."
            )
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class SequenceBlock:
    """Mixin for a block. The first one gets this rank's part of the hidden states (batch, sequence,
    hidden); what the last one returns is gathered. All blocks have it, so that they stay of one
    kind, of which a compiler makes one graph.

    A model may give each block more that has a row for every token, such as Gemma 4's embeddings of
    single layers. Where the block itself reads it, in addition to its part of the hidden states, it
    gets the same part; what it passes to its attention (positions, masks) stays whole.
    """

    tp_context: TensorParallel
    tp_stream: Stream | None
    tp_is_first: bool
    tp_is_last: bool
    tp_arguments: tuple[str, ...]
    tp_names_inside: frozenset[str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.tp_is_first:
            args, kwargs = self._slice(args, kwargs)
        args, kwargs = self._deal_others(args, kwargs)
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return self._collect(output) if self.tp_is_last else output

    def _slice(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, place = _hidden_states(args, kwargs)
        if hidden.ndim < 3:
            raise PlanError(
                "Sequence parallelism needs hidden states (batch, sequence, hidden); those of this"
                f" model have the shape {tuple(hidden.shape)}. Use sequence_parallel=False."
            )
        self.tp_context.sequence.length = hidden.shape[1]
        return _put(_Slice.apply(hidden, self.tp_context), place, args, kwargs)

    def _deal_others(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _, first = _hidden_states(args, kwargs)
        named = zip(self.tp_arguments, args, strict=False)
        places: list[tuple[int | str, str, Any]] = [
            (place, name, value) for place, (name, value) in enumerate(named)
        ]
        places += [(name, name, value) for name, value in kwargs.items()]
        for place, name, value in places:
            by_token = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3
            if (
                by_token
                and value.shape[1] == self.tp_context.sequence.length
                and place != first
                and name not in self.tp_names_inside
            ):
                args, kwargs = _put(_Slice.apply(value, self.tp_context), place, args, kwargs)
        return args, kwargs

    def _collect(self, output: Any) -> Any:
        whole = _Collect.apply(output[0] if isinstance(output, tuple) else output, self.tp_context)
        if self.tp_stream is not None:
            self.tp_stream.start()
        return (whole, *output[1:]) if isinstance(output, tuple) else whole


class GatheredRegion:
    """Mixin for a module whose layers are sharded, an attention or an MLP: it gets the whole
    sequence.

    Some mixtures of experts call one, a shared expert, with the rows of a batch one after the
    other: (batch * part, hidden).
    """

    tp_context: TensorParallel

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, place = _hidden_states(args, kwargs)
        context = self.tp_context
        flat = hidden.ndim == 2
        hidden = hidden.unflatten(0, (-1, context.sequence.part)) if flat else hidden
        whole = _gathered_again(_Gather, hidden, context)
        args, kwargs = _put(whole, place, args, kwargs)
        outer, context.gathered = (
            context.gathered,
            Gathered(whole, hidden, context) if _may_gather_again() else None,
        )
        try:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            context.gathered = outer
        return output.flatten(0, 1) if flat else output


class WholeRegion:
    """Mixin for an unsharded attention, or experts sharded over tp: gathers all tokens, runs, keeps
    this rank's slice.

    Some mixtures of experts return the rows of a batch one after the other: (batch * sequence,
    hidden).
    """

    tp_context: TensorParallel

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, place = _hidden_states(args, kwargs)
        args, kwargs = _put(_gathered_again(_Collect, hidden, self.tp_context), place, args, kwargs)
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        whole = output[0] if isinstance(output, tuple) else output
        flat = whole.ndim == 2 and hidden.ndim == 3
        part = _Slice.apply(
            whole.unflatten(0, (len(hidden), -1)) if flat else whole, self.tp_context
        )
        part = part.flatten(0, 1) if flat else part
        return (part, *output[1:]) if isinstance(output, tuple) else part


def _gathered_again(
    gather: type[_Gather | _Collect], part: Tensor, context: TensorParallel
) -> Tensor:
    """The parts of all ranks. A compiled block gathers them again in its backward: torch's
    partitioner keeps the results of collectives, except those in a recomputed part.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled() and context.gathers_again:
        whole: Tensor = checkpoint(gather.apply, part, context, use_reentrant=False)
        return whole
    return cast(Tensor, gather.apply(part, context))


def _may_gather_again() -> bool:
    """True if layers keep their part of a gathered input for the backward. A recomputed block
    gathers again as it is, a compiled one as `_gathered_again` says.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_recomputed()


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int | str]:
    """The hidden states among the arguments of a block or a module in it, and their position."""
    places: list[tuple[int | str, Any]] = [
        ("hidden_states", kwargs.get("hidden_states")),
        *enumerate(args),
        *kwargs.items(),
    ]
    for place, value in places:
        if isinstance(value, Tensor):
            return value, place
    raise PlanError(
        "A block of the model, or a module in it, was called without a tensor. Pass the hidden"
        " states to it."
    )


def _put(
    hidden: Tensor, place: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other hidden states."""
    if isinstance(place, str):
        return args, {**kwargs, place: hidden}
    return (*args[:place], hidden, *args[place + 1 :]), kwargs


class Gathered:
    """The input of a region in one forward: whole now, and gathered again for the gradients of
    weights in the backward.

    Attributes:
        whole: (batch, sequence, hidden).
    """

    def __init__(self, whole: Tensor, part: Tensor, context: TensorParallel) -> None:
        self.whole = whole
        self._part = part.detach()
        self._context = context
        self._memory = _Again(context)

    def multiply(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` of the whole input, of which only this rank's part is kept."""
        return _LinearOfPart.apply(self.whole, self._part, weight, bias, self._memory)


class _Again:
    """Gathers once for all layers of a region, and frees the result after the last of them; a
    backward that runs again gathers again."""

    def __init__(self, context: TensorParallel) -> None:
        self._context, self._length = context, context.sequence.length
        self._users = self._left = 0
        self._whole: Tensor | None = None

    def expect(self) -> None:
        self._users += 1
        self._left = self._users

    def whole(self, part: Tensor) -> Tensor:
        if self._whole is None:
            self._whole = gather_tokens(part, self._length, self._context.group)
        whole = self._whole
        self._left -= 1
        if self._left == 0:
            self._whole, self._left = None, self._users
        return whole


class _LinearOfPart(torch.autograd.Function):
    """`F.linear` that keeps this rank's part of its input instead of the whole."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, memory: _Again
    ) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.memory = memory
        if weight.requires_grad:
            memory.expect()
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part, weight = ctx.saved_tensors
        of_whole, _, of_weight, of_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            gradient @ weight if of_whole else None,
            None,
            rows.t() @ ctx.memory.whole(part).flatten(0, -2) if of_weight else None,
            rows.sum(0) if of_bias else None,
            None,
        )


class _Gather(torch.autograd.Function):
    """All parts forward; the sum of the gradients of this rank's part backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: TensorParallel) -> Tensor:
        ctx.context, ctx.length = context, context.sequence.length
        return gather_tokens(part, ctx.length, context.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return scatter_tokens(gradient, ctx.context.group), None


class _Scatter(torch.autograd.Function):
    """The sum of this rank's part forward; the gradients of all parts backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, context: TensorParallel) -> Tensor:
        ctx.context, ctx.length = context, partial.shape[1]
        return scatter_tokens(partial, context.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather_tokens(gradient, ctx.length, ctx.context.group), None


class _Slice(torch.autograd.Function):
    """Slice of a tensor that all ranks hold alike."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, context: TensorParallel) -> Tensor:
        ctx.context, ctx.length = context, whole.shape[1]
        return part_of_tokens(whole, context.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather_tokens(gradient, ctx.length, ctx.context.group), None


class _Collect(torch.autograd.Function):
    """Gather the parts of all ranks, all of which compute the same gradient of the result."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: TensorParallel) -> Tensor:
        ctx.context = context
        return gather_tokens(part, context.sequence.length, context.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return part_of_tokens(gradient, ctx.context.group), None


def scatter_sum(partial: Tensor, context: TensorParallel) -> Tensor:
    """This rank's part (batch, part, hidden) of the sum of `partial` (batch, sequence, hidden) over
    the group: one reduce-scatter."""
    return _Scatter.apply(partial, context)
