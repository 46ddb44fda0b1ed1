"""Messages about a rewritten model that does not reproduce the whole one: where the difference
begins, and its most frequent cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lightning_3d.engine.own_code import own_line
from lightning_3d.engine.self_check.compare import LARGEST, Deviation, first_different
from lightning_3d.engine.self_check.stages import RewrittenModel
from lightning_3d.errors import listed
from lightning_3d.layout.layout import Layout
from lightning_3d.models.library_patches import replaced_functions
from lightning_3d.models.parallel_plan import COLUMN_STYLES, ROW_STYLES, ParallelPlan
from lightning_3d.models.reachable import hook_tables, is_of_others


@dataclass(frozen=True)
class Explanation:
    """Messages about one model in one layout.

    Attributes:
        model: name of the model's class.
        plan: its parallel plan.
        added: hooks and replaced functions of a model whose own code and plan are not the user's.
    """

    model: str
    plan: ParallelPlan
    layout: Layout
    added: tuple[str, ...] = ()

    def of_layers(
        self,
        failure: Deviation | Exception,
        whole: nn.Module,
        rewritten: RewrittenModel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str:
        """Explain a difference that tp, cp or ep makes. Runs both models again; all ranks that
        share the layers call this together."""
        name = first_different(whole, rewritten, args, kwargs)
        if self.added:
            return f"{self._what(failure)}{_where(whole, name)} {self._addition()} {self._advice()}"
        if name is None and isinstance(failure, Deviation) and failure.parameter:
            name = failure.parameter.rpartition(".")[0]
            if (
                self.layout.tp > 1
                and name
                and self.plan.cut_of(name) is None
                and self.plan.cut_of(failure.parameter) is None
            ):
                return f"{self._what(failure)} {self._partial(name)} {self._advice()}"
        if name is None and isinstance(failure, Exception):
            name = _innermost(rewritten, args, kwargs)
        named = [
            key for named in (whole.named_modules(), whole.named_parameters()) for key, _ in named
        ]
        cuts = {key: cut.style for key in named if (cut := self.plan.cut_of(key)) is not None}
        owner = _around(name or "", cuts)
        order = _call_order(whole, owner, args, kwargs)
        cause = self._wrong_pair(owner, cuts, order) or self._cause(
            owner, cuts, whole, fails=isinstance(failure, Exception)
        )
        return f"{self._what(failure)}{_where(whole, owner)} {cause} {self._advice()}"

    def of_stages(self, failure: Deviation | Exception) -> str:
        """Explain a difference that only the pipeline makes."""
        if isinstance(failure, Exception):
            return (
                f"{self._what(failure)} With pp=1, the model runs. With pp > 1, each rank has the"
                " blocks of its own stage. Code that looks at other modules, at values of an"
                " earlier stage that are not in the hidden states, or at the class of a module"
                " (type(self)), finds others there. Write it so that it needs its arguments and"
                " its own weights alone, or use pp=1. Nothing was trained."
            )
        return (
            f"{self._what(failure)} With pp=1, the result is correct. So some module reads"
            " something from an earlier stage that is not in the hidden states: an embedding, a"
            " buffer, keys and values that an earlier block shares, or an attribute that it set."
            " Pass such values along in the hidden states, put the blocks that share them on one"
            " stage (stages=[...]), or use pp=1. Nothing was trained."
        )

    def _what(self, failure: Deviation | Exception) -> str:
        if isinstance(failure, Exception):
            error, line = f"{type(failure).__name__}: {first_line(failure)}", own_line(failure)
            at = f" at {line}" if line is not None else ""
            return (
                f"Self-check: {self.model} as rewritten for {self.layout.name} fails{at} ({error})."
            )
        size = (
            f" by {failure.error:.1e} (at most {LARGEST:g} is rounding)"
            if failure.error == failure.error
            else ""
        )
        return (
            f"Self-check: {self.model} as rewritten for {self.layout.name} does not reproduce the"
            f" whole model: {failure.what} differs{size}."
        )

    def _addition(self) -> str:
        tokens = (
            " With sequence_parallel=False, tp ranks have all tokens between the layers."
            if self.layout.tp > 1
            else ""
        )
        return (
            f"Likely cause: {listed(self.added[:3])}{' and others' if len(self.added) > 3 else ''}"
            " were added to the model, and run on this rank's tokens and features. They may not"
            f" depend on other tokens, or on their number or positions.{tokens}"
        )

    def _partial(self, name: str) -> str:
        return (
            f"Likely cause: '{name}' is replicated, but each rank uses it only on its own heads or"
            " columns. So each rank has only a part of its gradient. Add it to the plan's 'tp'"
            " part with the style 'replicated_with_grad_allreduce'."
        )

    def _wrong_pair(self, owner: str, cuts: Mapping[str, str], order: list[str]) -> str:
        """Explain styles of the linear layers in `owner` that do not fit the order in which its
        forward calls them; else ""."""
        columns = [name for name in order if cuts.get(name) in COLUMN_STYLES]
        rows = [name for name in order if cuts.get(name) in ROW_STYLES]
        if self.layout.tp == 1 or not columns or not rows:
            return ""
        if order.index(rows[0]) < order.index(columns[0]):
            return (
                f"Likely cause: the styles are reversed. {_last(rows)} ('rowwise')"
                f" {'run' if len(rows) > 1 else 'runs'} before {_last(columns)} ('colwise'). The"
                " layers that read the hidden states must be 'colwise', and the layer that writes"
                " them must be 'rowwise'."
            )
        between = [
            name
            for name in order[order.index(columns[0]) : order.index(rows[0])]
            if name not in cuts
        ]
        if between:
            return (
                f"Likely cause: the plan shards {_last(columns)} but not {_last(between)}, which"
                f" the same code calls before {_last(rows[:1])}. Add it with the style 'colwise'."
            )
        return ""

    def _cause(self, owner: str, cuts: Mapping[str, str], whole: nn.Module, *, fails: bool) -> str:
        inside = {key: style for key, style in cuts.items() if key.rpartition(".")[0] == owner}
        inside = inside or {
            key: style for key, style in cuts.items() if not owner or key.startswith(f"{owner}.")
        }
        columns = list(
            dict.fromkeys(
                key.rpartition(".")[2] for key, style in inside.items() if style in COLUMN_STYLES
            )
        )
        rows = list(
            dict.fromkeys(
                key.rpartition(".")[2] for key, style in inside.items() if style in ROW_STYLES
            )
        )
        tp = self.layout.tp
        if tp > 1 and columns and rows:
            return (
                f"Likely cause: between {listed(columns)} (column-parallel) and {listed(rows)}"
                f" (row-parallel), each rank has 1/{tp} of the features. The code there must read"
                " sizes such as the number of heads from the tensors, for example x.unflatten(-1,"
                " (-1, head_width)). A layer that packs several matrices (query, key and value;"
                " gate and up) needs Cut('packed_colwise', parts=(rows of each)) instead of"
                f" 'colwise'.{_shared_keys(whole, inside)}"
            )
        if tp > 1 and (columns or rows):
            missing, there = ("rowwise", columns) if columns else ("colwise", rows)
            return (
                f"Likely cause: the plan shards {listed(there)} but names no '{missing}' layer to"
                " go with it. Features that a 'colwise' layer splits must be joined by a 'rowwise'"
                f" layer. Add the '{missing}' layer to the plan's 'tp' part."
            )
        if tp == self.layout.ep == 1 and (fails or self.layout.cp == 1):
            tokens = (
                ""
                if self.layout.cp == 1
                else (
                    " It gets a part of the tokens of a row, so their number may be the reason,"
                    " too."
                )
            )
            return (
                "Likely cause: that code depends on more than its arguments, weights and"
                " attributes: on the class of the module (type(self)), a variable of the file, or"
                f" how often it has run.{tokens}"
            )
        if tp == self.layout.ep == 1:
            return (
                "Likely cause: the code of that module itself combines the tokens that it gets with"
                " others, or with something of the whole sequence, but with context parallelism"
                " (cp) it gets this rank's tokens. Move that code into a module of its own."
            )
        return (
            "Likely cause: a layer of that module is missing from the plan. Add the layer with its"
            " style."
        )

    def _advice(self) -> str:
        axes = [axis for axis in ("tp", "cp", "ep") if getattr(self.layout, axis) > 1]
        return (
            "Nothing was trained. See docs/your_model.md, or use"
            f" {listed(f'{axis}=1' for axis in axes) or 'pp=1'}."
        )


def _where(whole: nn.Module, name: str | None) -> str:
    return (
        f" The first module that differs is '{name}' ({type(whole.get_submodule(name)).__name__})."
        if name
        else ""
    )


def additions(module: nn.Module) -> tuple[str, ...]:
    """List the hooks in a model, the functions that replace methods of its modules, and those that
    replace functions of libraries."""
    found = []
    for name, child in module.named_modules():
        if any(
            is_of_others(hook) for table in hook_tables(child).values() for hook in table.values()
        ):
            found.append(f"a hook of '{name}'" if name else "a hook of the model")
        replaced = (
            key
            for key, value in vars(child).items()
            if isinstance(value, (FunctionType, MethodType)) and is_of_others(value)
        )
        found += (f"'{name}.{key}'".replace("'.", "'") for key in replaced)
    return (*found, *(place for place, _ in replaced_functions()))


def _shared_keys(whole: nn.Module, cuts: Mapping[str, str]) -> str:
    """Advise how to share keys and values where some column-parallel layers have fewer rows than
    others; else ""."""
    layers = dict(whole.named_modules())
    rows = {
        name: getattr(layers.get(name), "out_features", 0)
        for name, style in cuts.items()
        if style == "colwise"
    }
    smaller = [
        name.rpartition(".")[2] for name, count in rows.items() if count < max(rows.values())
    ]
    if not smaller:
        return ""
    named = listed(list(dict.fromkeys(smaller)))
    return (
        f" If {named} have fewer heads than there are tp ranks, ranks must share heads: use"
        " Cut('colwise', units=heads, shared=True)."
    )


def _last(names: list[str]) -> str:
    """List the last components of names."""
    return listed(name.rpartition(".")[2] for name in names)


def _call_order(
    whole: nn.Module, owner: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """Return the names of the linear layers directly in `owner`, in the order in which the whole
    model calls them."""
    called: list[str] = []
    prefix = f"{owner}." if owner else ""
    layers = {
        prefix + name: child
        for name, child in whole.get_submodule(owner).named_children()
        if isinstance(child, nn.Linear)
    }
    handles = [
        layer.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, layer in layers.items()
    ]
    try:
        with torch.no_grad():
            whole(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(called))


def first_line(error: BaseException | None) -> str:
    """Take the first line of an error's message, without its full stop."""
    return (str(error).strip().splitlines() or ["without a message"])[0].rstrip(".")


def _around(name: str, cuts: Mapping[str, str]) -> str:
    """Find the module to look at: for a sharded layer, or one next to sharded layers, the module
    around them, whose code matters."""
    parent = name.rpartition(".")[0]
    has_cuts = any(key.startswith(f"{name}.") for key in cuts)
    siblings = any(key.rpartition(".")[0] == parent for key in cuts)
    return parent if name and parent and siblings and not has_cuts else name


def _innermost(
    rewritten: RewrittenModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Find the innermost module that had begun and not returned when the model failed."""
    running: list[str] = []
    handles = []
    for stage in rewritten.modules():
        for name, child in stage.named_modules():

            def begin(child: nn.Module, args: Any, name: str = name) -> None:
                running.append(name)

            def end(child: nn.Module, args: Any, output: Any) -> None:
                running.pop()

            handles += [child.register_forward_pre_hook(begin), child.register_forward_hook(end)]
    try:
        with torch.no_grad():
            rewritten(*args, **kwargs)
    except Exception:
        return running[-1] if running else None
    finally:
        for handle in handles:
            handle.remove()
    return None
