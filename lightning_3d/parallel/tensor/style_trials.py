"""Styles for which the shards of an MLP or of a mixture's experts add up to the whole.

A style says how a tensor is sharded, but its meaning depends on the forward. If a forward splits a
fused `gate_up_proj` into halves, each half must be sharded separately (`packed_colwise`). If gate
and up are interleaved, the matrix is sharded as one (`colwise`). Some families declare the wrong
style. An activation that needs a whole row (Gemma 3n's sparse one) allows no sharding between the
layers at all. So each kind of module runs here once, whole and sharded, on a few random tokens and
weights (`parallel.trials`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_3d.compat.peft_layers import base_layer
from lightning_3d.compat.transformers import is_transposed_linear
from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import COLUMN_STYLES, ROW_STYLES, Cut, ParallelPlan
from lightning_3d.parallel.specialize import specialize
from lightning_3d.parallel.tensor.experts import SilentIdentity
from lightning_3d.parallel.tensor.heads import belongs_to_transformers, divisible_numbers, heads_of
from lightning_3d.parallel.tensor.resolve_plan import cut_dimension, resolve, share, with_cuts
from lightning_3d.parallel.trials.ask import ask
from lightning_3d.parallel.trials.clone import clone_in_float64
from lightning_3d.parallel.trials.tolerances import SUM_OF_SHARDS
from lightning_3d.parallel.trials.values import draw, generator_of, normal

_TOKENS = 5
_EXPERTS = 2  # experts that run; all of them would not fit in memory
_LARGE = 2**24  # elements of one expert's tensors above which a copy with small widths runs
_HIDDEN = 12  # small width of tokens
_COLUMNS = ("packed_colwise", "colwise")
_GATHERED = {
    "colwise": "colwise_gather_output",
    "packed_colwise": "colwise_gather_output",
    "rowwise": "rowwise_split_input",
}

Styles = dict[str, str]
Shapes = dict[str, tuple[int, ...]]
Values = dict[str, Tensor]
Trial = tuple[Values, list[tuple[Tensor, ...]]]


def fit_styles(module: nn.Module, plan: ParallelPlan, tp_size: int) -> ParallelPlan:
    """Return `plan` with the styles of experts and MLPs that their forwards need, resolved for
    these ranks (see `cuts_here`).

    A declared style stays where the parts add up, and where a module cannot be run on its own. An
    MLP for which no sharding adds up gets a gather pair, between whose layers every rank sees the
    whole.

    Args:
        module: the whole module, on meta or not. plan: `ParallelPlan.for_experts`.

    Raises:
        PlanError: the experts of a mixture cannot be cut in any known way.
    """
    if tp_size == 1:
        return plan
    cuts = resolve(module, plan, tp_size)
    fitted = _fitted(module, cuts, tp_size)
    if fitted:
        plan = replace(plan, tp=plan.tp | fitted)
        cuts = resolve(module, plan, tp_size)
    return with_cuts(module, plan, tp_size, cuts)


def _fitted(module: nn.Module, cuts: dict[str, Cut], tp_size: int) -> dict[str, Cut]:
    """The cuts with another style than declared, by exact name."""
    fitted: dict[str, Cut] = {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in cuts):
        inside = {
            name.rpartition(".")[2]: cut
            for name, cut in cuts.items()
            if name.rpartition(".")[0] == parent
        }
        around = cuts.get(parent)
        owner = module.get_submodule(parent)
        if around is not None and around.style == "moe_tp_experts":
            styles = ask(_styles_of_experts, owner, tuple(inside.items()), tp_size)
            if styles is None:
                raise PlanError(
                    f"The plan shards the experts '{parent}' ({type(owner).__name__}) over tp, but"
                    " in a trial with random tokens, the outputs of the shards do not add up to"
                    " the whole output. So the styles of the plan do not fit the forward. Use"
                    " tp=1, or ep if the plan has an 'ep' part."
                )
        elif _is_mlp(module, parent, inside):
            styles = ask(_styles_of_mlp, owner, tuple(inside.items()), tp_size)
        else:
            continue
        changed = {
            key: style for key, style in (styles or {}).items() if inside[key].style != style
        }
        fitted |= {
            f"{parent}.{key}": replace(inside[key], style=style) for key, style in changed.items()
        }
    return fitted


@dataclass
class _Probe:
    """A module that runs alone.

    Attributes:
        cuts: by name in it.
        fused: names of those that can be sharded by columns in more than one way.
        trials: each makes random tensors for all of its parameters, and what it may be called with;
            the first one that runs counts.
        run: (module, values, inputs, rank) -> its output.
        gathers: whether a gather pair is the last resort.
    """

    module: nn.Module
    cuts: Mapping[str, Cut]
    fused: list[str]
    trials: list[Callable[[], Trial]]
    run: Callable[[nn.Module, Values, tuple[Tensor, ...], int], Tensor]
    tp_size: int
    gathers: bool

    def fitting(self) -> Styles | None:
        """The styles that add up; those declared where the module does not run alone, None where no
        style is right."""
        return self._search({key: cut.style for key, cut in self.cuts.items()})

    def _search(self, declared: Styles) -> Styles | None:
        found = self._run_whole()
        if found is None:
            return declared
        values, inputs, whole = found
        others = [declared | dict.fromkeys(self.fused, style) for style in _COLUMNS]
        for styles in [declared, *(other for other in others if other != declared)]:
            if self._adds_up(styles, values, inputs, whole):
                return styles
        return (
            {key: _GATHERED.get(style, style) for key, style in declared.items()}
            if self.gathers
            else None
        )

    def _run_whole(self) -> tuple[Values, tuple[Tensor, ...], Tensor] | None:
        for trial in self.trials:
            values, several = trial()
            for inputs in several:
                try:
                    whole = self.run(self.module, values, inputs, 0)
                except Exception:  # it has other arguments, or cannot run alone
                    continue
                if isinstance(whole, Tensor) and bool(whole.isfinite().all()) and bool(whole.any()):
                    return values, inputs, whole
        return None

    def _adds_up(
        self, styles: Styles, values: Values, inputs: tuple[Tensor, ...], whole: Tensor
    ) -> bool:
        total = torch.zeros_like(whole)
        try:
            for rank in range(self.tp_size):
                parts = {key: self._part(key, value, styles, rank) for key, value in values.items()}
                total += self.run(self.module, parts, inputs, rank)
        except (RuntimeError, IndexError, ValueError, PlanError):
            return False  # shapes that do not fit each other
        return bool((total - whole).abs().max() <= SUM_OF_SHARDS * whole.abs().max())

    def _part(self, name: str, value: Tensor, styles: Styles, rank: int) -> Tensor:
        """Shard of a parameter. The bias of a row-parallel layer is added once."""
        layer = name if name in styles else name.rpartition(".")[0]
        if layer not in styles:
            return value
        is_bias = name.endswith(".bias")
        transposed = is_transposed_linear(self.module._modules.get(layer))
        dim = cut_dimension(styles[layer], value.ndim, is_bias=is_bias, transposed=transposed)
        if dim is None:
            return value * (rank == 0) if is_bias else value
        pieces = share(
            layer, Cut(styles[layer], self.cuts[layer].units), value.shape[dim], self.tp_size, rank
        ).pieces
        return torch.cat([value.narrow(dim, start, length) for start, length in pieces], dim)


def _styles_of_experts(
    experts: nn.Module, items: tuple[tuple[str, Cut], ...], tp_size: int
) -> Styles | None:
    """Fit experts with parameters (experts, ...) of their own; one or two of them run, in a loop.

    Args:
        items: cuts by name in them.
    """
    cuts = dict(items)
    shapes = {key: tuple(parameter.shape) for key, parameter in experts.named_parameters()}
    if not shapes or any("." in key for key in shapes):
        return {key: cut.style for key, cut in items}
    idle = [key for key, cut in items if cut.style == "moe_identity_expert"]
    large = sum(math.prod(shape[1:]) for shape in shapes.values()) >= _LARGE
    trials: list[Callable[[], Trial]] = [
        lambda: _experts_trial(shapes, 1 if large else _EXPERTS, idle=bool(idle))
    ]
    if large and (narrow := _narrow(shapes, cuts, tp_size)) is not None:
        trials.insert(0, lambda: _experts_trial(narrow, _EXPERTS, idle=bool(idle)))

    def run(experts: nn.Module, values: Values, inputs: tuple[Tensor, ...], rank: int) -> Tensor:
        tried = clone_in_float64(experts, lambda name, _: values[name])
        for key in idle if rank else ():
            specialize(tried.get_submodule(key), SilentIdentity)
        return _call(tried, inputs)

    fused = [key for key, cut in items if cut.style in _COLUMNS]
    return _Probe(experts, cuts, fused, trials, run, tp_size, gathers=False).fitting()


def _experts_trial(shapes: Shapes, some: int, *, idle: bool) -> Trial:
    """Values for `some` experts, and tokens of every width that may be the right one.

    Args:
        idle: there are experts without weights, which come after the others.
    """
    generator = generator_of("tokens")
    number = max(shape[0] for shape in shapes.values())
    values = {key: draw(key, (min(shape[0], some), *shape[1:])) for key, shape in shapes.items()}
    named = [0, number - 1 if idle else min(number, some) - 1]
    index = torch.tensor([[named[row % 2], named[1 - row % 2]] for row in range(_TOKENS)])
    weights = 0.5 + torch.rand(_TOKENS, 2, generator=generator, dtype=torch.float64)
    widths = sorted({size for shape in shapes.values() for size in shape[1:]})
    routed = [(normal((_TOKENS, width), generator), index, weights) for width in widths]
    # Llama 4's
    sorted_by_expert = [
        (normal((min(number, some) * _TOKENS, width), generator),) for width in widths
    ]
    return values, [*routed, *sorted_by_expert]


def _narrow(shapes: Shapes, cuts: Mapping[str, Cut], tp_size: int) -> Shapes | None:
    """Copy experts with small widths; None if it is unclear which dimensions are sharded."""
    inner: set[int] = set()
    outer: set[int] = set()
    for key, cut in cuts.items():
        if key in shapes and cut.style in COLUMN_STYLES | ROW_STYLES:
            dim = cut_dimension(cut.style, len(shapes[key]), is_bias=False)
            assert dim is not None
            inner.add(shapes[key][dim])
            outer |= set(shapes[key][1:]) - {shapes[key][dim]}
    if (
        inner & outer
        or len(outer) != 1
        or {size for shape in shapes.values() for size in shape[1:]} != inner | outer
    ):
        return None
    base = math.gcd(*inner)
    small = {size: size // base * 4 * tp_size for size in inner} | dict.fromkeys(outer, _HIDDEN)
    return {key: (shape[0], *(small[size] for size in shape[1:])) for key, shape in shapes.items()}


def _linear_layers(parent: nn.Module) -> dict[str, nn.Linear]:
    return {
        key: layer
        for key, child in parent.named_children()
        if isinstance(layer := base_layer(child), nn.Linear)
    }


def _is_mlp(module: nn.Module, name: str, cuts: Mapping[str, Cut]) -> bool:
    """Return whether a module has column- and row-parallel layers and nothing else that is trained,
    and is not an attention."""
    parent = module.get_submodule(name)
    layers = _linear_layers(parent)
    columns = [key for key, cut in cuts.items() if cut.style in _COLUMNS]
    rows = [key for key, cut in cuts.items() if cut.style == "rowwise"]
    # those of adapters too
    of_layers = {
        id(parameter) for key in layers for parameter in parent.get_submodule(key).parameters()
    }
    is_plain = (
        layers.keys() == cuts.keys()
        and {id(parameter) for parameter in parent.parameters()} == of_layers
    )
    if not columns or not rows or len(columns) + len(rows) < len(cuts) or not is_plain:
        return False
    if any(cut.parts is not None or cut.units is not None for cut in cuts.values()):
        return False  # the plan has more than a style
    return (
        heads_of(module, name, {f"{name}.{key}" if name else key: cut for key, cut in cuts.items()})
        is None
    )


def _styles_of_mlp(
    parent: nn.Module, items: tuple[tuple[str, Cut], ...], tp_size: int
) -> Styles | None:
    """Fit the layers directly in a module, at small widths.

    Args:
        items: their cuts by name in it.
    """
    layers = _linear_layers(parent)
    columns = [key for key, cut in items if cut.style in _COLUMNS]
    inner = [
        layers[key].out_features if key in columns else layers[key].in_features for key, _ in items
    ]
    base = math.gcd(*inner)
    unit = 4 * tp_size

    def small(layer: nn.Linear, key: str) -> tuple[int, int]:
        if key in columns:
            return layer.out_features // base * unit, _HIDDEN
        return _HIDDEN, layer.in_features // base * unit

    def trial() -> Trial:
        values = {
            f"{key}.weight": draw(f"{key}.weight", small(layer, key))
            for key, layer in layers.items()
        }
        values |= {
            f"{key}.bias": draw(f"{key}.bias", small(v, key)[:1])
            for key, v in layers.items()
            if v.bias is not None
        }
        return values, [(normal((1, _TOKENS, _HIDDEN), generator_of("tokens")),)]

    # With a smaller number in it, an attention of the user's own may need no gathers: `self_check`
    # tries that.
    gathers = belongs_to_transformers(parent) or not divisible_numbers(parent, tp_size)
    return _Probe(parent, dict(items), columns, [trial], _run_layers, tp_size, gathers).fitting()


def _run_layers(parent: nn.Module, values: Values, inputs: tuple[Tensor, ...], rank: int) -> Tensor:
    tried = clone_in_float64(
        parent, lambda _, parameter: torch.empty(parameter.shape, device="meta")
    )
    for key in {name.rpartition(".")[0] for name in values}:
        weight = values[f"{key}.weight"]
        layer = nn.Linear(
            weight.shape[1], weight.shape[0], bias=f"{key}.bias" in values, device="meta"
        )
        own = {
            name.rpartition(".")[2]: value
            for name, value in values.items()
            if name.startswith(f"{key}.")
        }
        layer.load_state_dict(own, assign=True)
        tried._modules[key] = layer
    return _call(tried, inputs)


def _call(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Call the forward of its class, without hooks, which belong to the model."""
    output: Tensor = type(module).forward(module, *inputs)
    return output
