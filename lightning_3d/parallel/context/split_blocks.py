"""Context parallelism of models whose blocks mix tokens in other ways than by attention that can be
replaced: state spaces, linear attention, convolutions, attention with biases, chunks or indexers.

    before the first block    this rank keeps its tokens of the hidden states        backward: zeros for the others
    into what mixes tokens    the tokens of all ranks are gathered, in order         backward: reduce-scatter
    out of it                 this rank keeps its tokens                             backward: zeros for the others
    into plain attention      nothing: keys and values travel (`ring`, `ulysses`)
    behind the last block     the tokens of all ranks are gathered                   backward: reduce-scatter
    into the output head      this rank keeps its tokens; logits are gathered only if they are read

Everything outside the blocks sees whole sequences: positions, masks, embeddings, norms, losses. So
whatever a model derives from them is what it is on one process. Every rank computes what mixes
tokens for all of them, except attention that can be replaced. Norms, MLPs, experts and logits are
shared out.
"""  # noqa: E501

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.torch import in_backward
from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import is_ahead
from lightning_3d.parallel.context.attention import Running, running
from lightning_3d.parallel.context.checks import replace_some_attention
from lightning_3d.parallel.context.collectives import gather_sequence
from lightning_3d.parallel.context.full_sequence import WholeSequence
from lightning_3d.parallel.context.group import ContextParallel
from lightning_3d.parallel.context.inputs import named_arguments, refuse_arguments, tokens_of
from lightning_3d.parallel.context.masks import mask_of_batch
from lightning_3d.parallel.context.zigzag import chunk_length, own_tokens
from lightning_3d.parallel.specialize import specialize
from lightning_3d.parallel.trials.tokens import mixing_tokens


@dataclass
class SplitSequence:
    """State that the parts of a model share.

    Attributes:
        model: name of the model's class.
        context: the ranks that share a sequence.
        length: tokens of the whole sequence in the forward that is running.
        inner: sizes of hidden states behind (batch, sequence), set by the first block that runs.
        gathered: whether the last block has gathered its hidden states in this forward.
    """

    model: str
    context: ContextParallel
    length: int = 0
    inner: tuple[int, ...] = ()
    gathered: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitSequence:
        """A copied model (weight averaging) talks to the same ranks."""
        return self

    def is_hidden(self, value: Any, length: int) -> bool:
        """Return whether an argument is made of hidden states of so many tokens."""
        if (
            not isinstance(value, Tensor)
            or not value.is_floating_point()
            or value.ndim < 3
            or value.shape[1] != length
        ):
            return False
        return value.ndim == 3 or tuple(value.shape[2:]) == self.inner  # not the heads of a mask

    def require_gathered(self) -> None:
        """Refuse to go on behind the blocks with a part of the tokens.

        Raises:
            PlanError: the last block has not gathered them.
        """
        if not self.gathered:
            raise PlanError(
                f"Context parallelism (cp) cannot split the sequences of {self.model}: its last"
                " block did not run, or did not return hidden states (batch, sequence, hidden)."
                " Use cp=1."
            )

    @property
    def part(self) -> int:
        """Tokens of this rank."""
        return self.length // self.context.size

    def own(self, whole: Tensor) -> Tensor:
        """Select this rank's tokens of (batch, seq, ...)."""
        return own_tokens(whole, self.context.size, self.context.rank)

    def own_positions(self, value: Any) -> Any:
        """Select this rank's tokens of positions, (batch, seq), and of what is computed from them,
        (batch, seq, width), also in tuples."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.own_positions, value))
        is_whole = (
            isinstance(value, Tensor) and value.ndim in (2, 3) and value.shape[1] == self.length
        )
        return self.own(value) if is_whole else value

    def whole(self, part: Tensor) -> Tensor:
        """Gather the tokens of all ranks."""
        return gather_sequence(part, self.context)


@dataclass(frozen=True)
class SplitBlocks:
    """Blocks between which each rank has its part of the tokens.

    Attributes:
        sequence: what they share.
        blocks: all blocks of the model, in order.
        mixing: the modules in them that mix tokens, each once.
        attentions: those of them that call our attention.
        arguments: names of the arguments of each block, before anything is put in front of its
            forward.
        arguments_inside: names of the arguments of what mixes tokens.
    """

    sequence: SplitSequence
    blocks: list[nn.Module]
    mixing: list[nn.Module]
    attentions: list[nn.Module]
    arguments: list[tuple[str, ...]]
    arguments_inside: frozenset[str]

    @classmethod
    def of(
        cls, module: nn.Module, blocks: list[nn.Module], layers: str, context: ContextParallel
    ) -> SplitBlocks:
        """Find what mixes tokens in the blocks of the whole `module`.

        Args:
            blocks: as `find_blocks` returns them.
            layers: name of the list of blocks; empty if the plan does not say it.

        Raises:
            PlanError: it has no list of blocks, or more than one.
        """
        name = type(module).__name__
        found = blocks if layers else _only_list(module, name, blocks)
        width = _width(module)
        mixing = {id(part): part for block in found for part in mixing_tokens(block, width)}
        if not found or not mixing:
            raise PlanError(
                f"Context parallelism (cp) found no blocks in {name} in which tokens see each"
                " other. Use cp=1."
            )
        parts = list(mixing.values())
        inside = frozenset(argument for part in parts for argument in _arguments(part))
        attentions = replace_some_attention(module, parts)
        return cls(
            SplitSequence(name, context),
            found,
            parts,
            attentions,
            [_arguments(block) for block in found],
            inside,
        )

    @property
    def computed_by_all(self) -> list[str]:
        """Kinds of modules that every context-parallel rank computes for the whole sequence, on all
        pipeline stages."""
        attentions = {id(part) for part in self.attentions}
        return sorted({type(part).__name__ for part in self.mixing if id(part) not in attentions})

    def gather_inside(self) -> None:
        """Make what mixes tokens gather them, in place, unless it calls our attention."""
        attentions = {id(part) for part in self.attentions}
        for part in self.mixing:
            specialize(
                part,
                SplitAttention if id(part) in attentions else MixingTokens,
                context_split=self.sequence,
            )

    def split_outside(self, module: nn.Module) -> None:
        """Make the first block of the whole `module` split the sequence and the last one gather it,
        in place. Blocks that run behind the model, outside of the row, do both."""
        row = [block for block in self.blocks if not is_ahead(block)]
        for block, names in zip(self.blocks, self.arguments, strict=True):
            specialize(
                block,
                SplitBlock,
                context_split=self.sequence,
                context_is_first=block is row[0] or is_ahead(block),
                context_is_last=block is row[-1] or is_ahead(block),
                context_names=names,
                context_names_inside=self.arguments_inside,
            )
        specialize(
            module,
            SplitModel,
            context_split=self.sequence,
            context_layers={} if self.attentions else None,
        )

    def split_head(self, module: nn.Module) -> None:
        """Make the output head of this rank's part of `module` compute logits of this rank's
        tokens, in place."""
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Linear):
            specialize(head, SplitHead, context_split=self.sequence)


def _only_list(module: nn.Module, name: str, blocks: list[nn.Module]) -> list[nn.Module]:
    """The one list of modules that has as many blocks as the configuration says."""
    config: Any = module.config
    wanted = getattr(config.get_text_config(), "num_hidden_layers", None)
    lists = [
        list(found.children()) for found in module.modules() if isinstance(found, nn.ModuleList)
    ]
    among = {id(block) for block in blocks}
    chosen = [
        found
        for found in lists
        if len(found) == wanted and all(id(block) in among for block in found)
    ]
    if len(chosen) != 1:
        raise PlanError(
            "Context parallelism (cp) splits the sequence between the blocks of a model, but"
            f" {name} has {len(chosen)} lists of {wanted} blocks. Use cp=1."
        )
    return chosen[0]


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _width(module: nn.Module) -> int:
    config: Any = module.config
    width = getattr(config.get_text_config(), "hidden_size", None)
    return width if isinstance(width, int) else 0  # then no module runs alone, and each gathers


class SplitModel:
    """Mixin for the model: notes the length of the sequence, and refuses what would return parts of
    it."""

    context_split: SplitSequence
    context_layers: dict[Any, bool] | None  # None: no module calls our attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = super().forward  # type: ignore[misc]
        arguments = named_arguments(own, args, kwargs)
        config = getattr(self, "config", None)
        hidden = arguments.get(
            "output_hidden_states", getattr(config, "output_hidden_states", False)
        )
        refuse_arguments(arguments | {"output_hidden_states": hidden}, "output_hidden_states")
        split = self.context_split
        tokens = tokens_of(arguments)
        split.length = tokens.shape[1]
        chunk_length(split.length, split.context.size)
        split.gathered = False
        output = self._run(own, arguments, tokens)
        split.require_gathered()
        return output

    def _run(self, own: Any, arguments: dict[str, Any], tokens: Tensor) -> Any:
        split = self.context_split
        if self.context_layers is None:
            return own(**arguments)
        ids = arguments.get("position_ids")
        mask = mask_of_batch(
            split.context, (len(tokens), split.length), arguments.get("attention_mask"), ids
        )
        counted = (
            torch.arange(split.length, device=tokens.device).unsqueeze(0) if ids is None else ids
        )
        with running(Running(mask, counted, len(tokens), self.context_layers)):
            return own(**arguments)


def is_split(module: nn.Module) -> bool:
    """Return whether the logits of a model report the whole sequence inside its own forward, where
    its loss is computed."""
    return any(isinstance(child, SplitModel) for child in module.modules())


def use_context(module: nn.Module, context: ContextParallel) -> None:
    """Let the parts of a model whose blocks are split communicate as `context` says."""
    for child in module.modules():
        if isinstance(child, SplitModel):
            child.context_split.context = context


class SplitBlock:
    """Mixin for a block. The first one gets this rank's tokens of the hidden states; what the last
    one returns is gathered.

    Further hidden states of the whole sequence that the block itself reads are split too; those
    that it passes on to what mixes tokens stay whole.
    """

    context_split: SplitSequence
    context_is_first: bool
    context_is_last: bool
    context_names: tuple[str, ...]
    context_names_inside: frozenset[str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self.context_names, args, strict=False)) | kwargs
        first = next(
            (name for name in ("hidden_states", *named) if isinstance(named.get(name), Tensor)),
            None,
        )
        self._require(None if first is None else named[first])
        split = self.context_split
        places = {name: place for place, name in enumerate(self.context_names[: len(args)])}
        values = list(args)
        for name, value in named.items():
            is_own = (name == first and self.context_is_first) or (
                name != first and name not in self.context_names_inside
            )
            if is_own and split.is_hidden(value, split.length):
                if name in places:
                    values[places[name]] = split.own(value)
                else:
                    kwargs[name] = split.own(value)
        output = super().forward(*values, **kwargs)  # type: ignore[misc]
        if not self.context_is_last:
            return output
        gather = _Counted(split.whole, split)
        output = _each(output, lambda value: gather(value, split.part))
        split.gathered = gather.count > 0
        return output

    def _require(self, hidden: Tensor | None) -> None:
        """Refuse blocks that are called in another order than they are listed, or with something
        else than hidden states."""
        split = self.context_split
        # sequences may have had another length since then
        if hidden is not None and hidden.ndim >= 3 and in_backward():
            split.length = hidden.shape[1] * (1 if self.context_is_first else split.context.size)
        expected = split.length if self.context_is_first else split.part
        if hidden is None or hidden.ndim < 3 or hidden.shape[1] != expected:
            found = (
                "no tensor" if hidden is None else f"hidden states of shape {tuple(hidden.shape)}"
            )
            raise PlanError(
                f"Context parallelism (cp) cannot split the sequences of {split.model}: a block"
                f" ({type(self).__name__}) was called with {found}, not (batch, {expected},"
                " hidden). Use cp=1."
            )
        split.inner = tuple(hidden.shape[2:])


class MixingTokens:
    """Mixin for a module that mixes tokens: gathers the hidden states among its arguments, runs,
    and keeps this rank's tokens."""

    context_split: SplitSequence

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        split = self.context_split
        gather, keep = _Counted(split.whole, split), _Counted(split.own, split)
        args, kwargs = (
            tuple(gather(value, split.part) for value in args),
            {name: gather(kwargs[name], split.part) for name in kwargs},
        )
        output = _each(super().forward(*args, **kwargs), lambda value: keep(value, split.length))  # type: ignore[misc]
        if not gather.count or not keep.count:
            how = "was called without" if not gather.count else "does not return"
            raise PlanError(
                f"Context parallelism (cp) cannot split the sequences of {split.model}:"
                f" {type(self).__name__} mixes tokens, but {how} hidden states (batch, sequence,"
                " hidden). Use cp=1."
            )
        return output


@dataclass
class _Counted:
    """Function for the hidden states among values, which counts them; other values stay as they
    are."""

    function: Callable[[Tensor], Tensor]
    split: SplitSequence
    count: int = 0

    def __call__(self, value: Any, length: int) -> Any:
        """Apply the function if `value` is made of hidden states of so many tokens."""
        if not self.split.is_hidden(value, length):
            return value
        self.count += 1
        return self.function(value)


class SplitAttention:
    """Mixin for an attention that calls ours: works on this rank's tokens, and gets the positions
    of these."""

    context_split: SplitSequence

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self.context_split.own_positions
        return super().forward(  # type: ignore[misc]
            *map(own, args), **{name: own(value) for name, value in kwargs.items()}
        )


class SplitHead:
    """Mixin for the output head: logits of this rank's tokens, which report the shape of all."""

    context_split: SplitSequence

    def forward(self, input: Tensor) -> Tensor:
        split = self.context_split
        split.require_gathered()
        if input.ndim != 3 or input.shape[1] != split.length:  # chosen tokens
            return super().forward(input)  # type: ignore[misc]
        return WholeSequence(super().forward(split.own(input)), split.context)  # type: ignore[misc]


def _each(output: Any, function: Any) -> Any:
    """Apply a function to an output, or to each value of a tuple of outputs."""
    if isinstance(output, (tuple, list)) and not hasattr(output, "_fields"):
        return type(output)(map(function, output))
    return function(output)
