"""Styles for which the shards of an MLP or of a mixture's experts add up to the whole.

A style says how a tensor is sharded, but its meaning depends on the forward. If a forward splits a
fused `gate_up_proj` into halves, each half must be sharded separately (`packed_colwise`). If gate
and up are interleaved, the matrix is sharded as one (`colwise`). Some families declare the wrong
style. An activation that needs a whole row (Gemma 3n's sparse one) allows no sharding between the
layers at all. So each kind of module runs here once, whole and sharded, on a few random tokens and
weights, in float32 on the CPU: no rank communicates, and the model may be on meta.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.peft_layers import base_layer
from lightning_3d.compat.torch import real_values
from lightning_3d.compat.transformers import is_transposed_linear
from lightning_3d.errors import PlanError
from lightning_3d.models.code_description import code_and_sizes
from lightning_3d.models.parallel_plan import COLUMN_STYLES, ROW_STYLES, Cut, ParallelPlan
from lightning_3d.parallel.module_copy import deep_copy
from lightning_3d.parallel.specialize import specialize
from lightning_3d.parallel.tensor.experts import SilentIdentity
from lightning_3d.parallel.tensor.heads import belongs_to_transformers, divisible_numbers, heads_of
from lightning_3d.parallel.tensor.resolve_plan import cut_dimension, resolve, share
from lightning_3d.parallel.undone import undone

_TOKENS = 5
_EXPERTS = 2  # experts that run; all of them would not fit in memory
_LARGE = 2**24  # elements of one expert's tensors above which a copy with small widths runs
_HIDDEN = 12  # small width of tokens
_TOLERANCE = 1e-3  # relative to the whole; a different function is off by about 1
_COLUMNS = ("packed_colwise", "colwise")
_GATHERED = {
    "colwise": "colwise_gather_output",
    "packed_colwise": "colwise_gather_output",
    "rowwise": "rowwise_split_input",
}
_KNOWN: dict[tuple[Any, ...], dict[str, str] | None] = {}

Styles = dict[str, str]
Shapes = dict[str, tuple[int, ...]]
Values = dict[str, Tensor]
Trial = tuple[Values, list[tuple[Tensor, ...]]]


def fit_styles(module: nn.Module, plan: ParallelPlan, tp_size: int) -> ParallelPlan:
    """Return `plan` with the styles of experts and MLPs that their forwards need.

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
    with real_values(), torch.device("cpu"):
        fitted = _fitted(module, cuts, tp_size)
    return replace(plan, tp=plan.tp | fitted) if fitted else plan


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
        is_mixture = around is not None and around.style == "moe_tp_experts"
        probe = (_experts if is_mixture else _mlp)(module, parent, inside, tp_size)
        if probe is None:
            continue
        styles = probe.fitting()
        if styles is None and not is_mixture:
            continue
        if styles is None:
            raise PlanError(
                f"The plan shards the experts '{parent}' ({type(probe.module).__name__}) over tp,"
                " but in a trial with random tokens, the outputs of the shards do not add up to"
                " the whole output. So the styles of the plan do not fit the forward. Use tp=1, or"
                " ep if the plan has an 'ep' part."
            )
        fitted |= {
            f"{parent}.{key}": replace(inside[key], style=style)
            for key, style in styles.items()
            if inside[key].style != style
        }
    return fitted


@dataclass
class _Probe:
    """A module that runs alone.

    Attributes:
        cuts: by name in it.
        fused: names of those that can be sharded by columns in more than one way.
        idle: experts without weights, which one rank counts.
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
        style is right. Found once."""
        declared = {key: cut.style for key, cut in self.cuts.items()}
        code = code_and_sizes(self.module)
        known = (code, tuple(declared.items()), self.tp_size)
        if code is None or known not in _KNOWN:
            with undone(self.module):
                _KNOWN[known] = self._search(declared)
        return _KNOWN[known]

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
        return bool((total - whole).abs().max() <= _TOLERANCE * whole.abs().max())

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


def _experts(module: nn.Module, name: str, cuts: Mapping[str, Cut], tp_size: int) -> _Probe | None:
    """Fit the experts called `name`, with parameters (experts, ...) of their own; one or two of
    them run, in a loop."""
    experts = module.get_submodule(name)
    shapes = {key: tuple(parameter.shape) for key, parameter in experts.named_parameters()}
    if not shapes or any("." in key for key in shapes):
        return None
    idle = [key for key, cut in cuts.items() if cut.style == "moe_identity_expert"]
    large = sum(math.prod(shape[1:]) for shape in shapes.values()) >= _LARGE
    trials: list[Callable[[], Trial]] = [
        lambda: _experts_trial(shapes, 1 if large else _EXPERTS, idle=bool(idle))
    ]
    if large and (narrow := _narrow(shapes, cuts, tp_size)) is not None:
        trials.insert(0, lambda: _experts_trial(narrow, _EXPERTS, idle=bool(idle)))

    def run(experts: nn.Module, values: Values, inputs: tuple[Tensor, ...], rank: int) -> Tensor:
        clone = _clone(experts)
        clone._parameters = {key: nn.Parameter(value) for key, value in values.items()}
        for key in idle if rank else ():
            specialize(clone.get_submodule(key), SilentIdentity)
        return _call(clone, inputs)

    fused = [key for key, cut in cuts.items() if cut.style in _COLUMNS]
    return _Probe(experts, cuts, fused, trials, run, tp_size, gathers=False)


def _experts_trial(shapes: Shapes, some: int, *, idle: bool) -> Trial:
    """Values for `some` experts, and tokens of every width that may be the right one.

    Args:
        idle: there are experts without weights, which come after the others.
    """
    generator = torch.Generator().manual_seed(0)
    number = max(shape[0] for shape in shapes.values())
    values = {
        key: torch.randn(min(shape[0], some), *shape[1:], generator=generator) / shape[-1] ** 0.5
        for key, shape in shapes.items()
    }
    named = [0, number - 1 if idle else min(number, some) - 1]
    index = torch.tensor([[named[row % 2], named[1 - row % 2]] for row in range(_TOKENS)])
    weights = 0.5 + torch.rand(_TOKENS, 2, generator=generator)
    widths = sorted({size for shape in shapes.values() for size in shape[1:]})
    routed = [
        (torch.randn(_TOKENS, width, generator=generator), index, weights) for width in widths
    ]
    # Llama 4's
    sorted_by_expert = [
        (torch.randn(min(number, some) * _TOKENS, width, generator=generator),) for width in widths
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


def _mlp(module: nn.Module, name: str, cuts: Mapping[str, Cut], tp_size: int) -> _Probe | None:
    """Fit the module called `name` with column- and row-parallel layers and nothing else that is
    trained, unless it is an attention."""
    parent = module.get_submodule(name)
    layers = {
        key: layer
        for key, child in parent.named_children()
        if isinstance(layer := base_layer(child), nn.Linear)
    }
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
    full_names = {f"{name}.{key}" if name else key: cut for key, cut in cuts.items()}
    if (
        not columns
        or not rows
        or len(columns) + len(rows) < len(cuts)
        or not is_plain
        or heads_of(module, name, full_names) is not None
    ):
        return None
    if any(cut.parts is not None or cut.units is not None for cut in cuts.values()):
        return None  # the plan has more than a style
    inner = [layers[key].out_features for key in columns] + [
        layers[key].in_features for key in rows
    ]
    unit, base, hidden = 4 * tp_size, math.gcd(*inner), _HIDDEN

    def small(layer: nn.Linear, key: str) -> tuple[int, int]:
        return (
            (layer.out_features // base * unit, hidden)
            if key in columns
            else (hidden, layer.in_features // base * unit)
        )

    def trial() -> Trial:
        generator = torch.Generator().manual_seed(0)
        values = {
            f"{key}.weight": torch.randn(small(layer, key), generator=generator) / 3
            for key, layer in layers.items()
        }
        values |= {
            f"{k}.bias": torch.randn(small(v, k)[0], generator=generator) / 3
            for k, v in layers.items()
            if v.bias is not None
        }
        return values, [(torch.randn(1, _TOKENS, hidden, generator=generator),)]

    # With a smaller number in it, an attention of the user's own may need no gathers: `self_check`
    # tries that.
    gathers = belongs_to_transformers(parent) or not divisible_numbers(parent, tp_size)
    return _Probe(parent, cuts, columns, [trial], _run_layers, tp_size, gathers)


def _run_layers(parent: nn.Module, values: Values, inputs: tuple[Tensor, ...], rank: int) -> Tensor:
    clone = _clone(parent)
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
        clone._modules[key] = layer
    return _call(clone, inputs)


def _clone(module: nn.Module) -> Any:
    """A copy with modules and buffers of its own that shares plain attributes."""
    clone = copy.copy(module)
    clone.__dict__ = dict(vars(module))
    clone._buffers = {
        key: None if value is None else torch.zeros(value.shape, dtype=value.dtype)
        for key, value in module._buffers.items()
    }
    # the caller replaces these
    large = {
        key for key, child in module._modules.items() if isinstance(base_layer(child), nn.Linear)
    }
    clone._modules = {
        key: child if key in large or child is None else deep_copy(child)
        for key, child in module._modules.items()
    }
    if hasattr(clone, "config"):
        config: Any = copy.copy(clone.config)
        config._experts_implementation = "eager"
        clone.config = config
    return clone


@torch.no_grad()
def _call(module: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    """Call the forward of its class, without hooks, which belong to the model."""
    output: Tensor = type(module).forward(module, *inputs)
    return output
