"""Recomputation, offload and compilation around the forward of blocks."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.compat.torch import (
    allow_graphs,
    allow_notes_in_recomputation,
    allow_second_backward,
    graph_breaks,
    keep_order_in_graphs,
    uncompiled_frames,
)
from lightning_3d.errors import ConfigError
from lightning_3d.layout.schedules import find_schedule
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.parallel.blocks.offload import SavedOnHost
from lightning_3d.parallel.blocks.recompute import Moment, Recompute, expensive, operators, parts_of
from lightning_3d.parallel.specialize import specialize


def find_blocks(module: nn.Module, plan: ParallelPlan) -> list[nn.Module]:
    """The blocks of `module`, in the order in which they are called: of the plan, else of all lists
    of modules."""
    if plan.layers:
        return list(_called(module.get_submodule(plan.layers)))
    lists = [found for found in module.modules() if isinstance(found, nn.ModuleList)]
    blocks = [block for modules in lists for block in _called(modules)]
    inner = {id(module) for block in blocks for module in list(block.modules())[1:]}
    distinct = {id(block): block for block in blocks if id(block) not in inner}
    return list(distinct.values())


def _called(modules: nn.Module) -> Iterator[nn.Module]:
    """The modules with parameters in a list of modules that have a forward of their own; nested
    lists are searched."""
    for module in modules.children():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(module)
        elif any(True for _ in module.parameters()):
            yield module


def process_blocks(
    blocks: list[nn.Module],
    options: BlockOptions,
    moment: Moment | None = None,
    compiler: Callable[..., Any] | None = None,
    exchanging: Collection[nn.Module] = (),
) -> None:
    """Apply the options to the forward of each block, in place. Names, hooks and parameters stay.

    Args:
        blocks: of the whole model.
        moment: see `Recompute`.
        compiler: what compiles a forward, None for `torch.compile`.
        exchanging: modules with messages whose results cannot be kept, which a selective
            recomputation leaves out.

    Raises:
        ConfigError: there is nothing to which an option could apply, or an operator that does not
            exist.
    """
    if not options.changes_blocks:
        return
    if not blocks:
        raise ConfigError(
            "The model has no list of blocks (no parallel plan, no nn.ModuleList), so recompute,"
            " offload_activations and compile have nothing to apply to. Remove these options, or"
            " put the model's layers into an nn.ModuleList."
        )
    keep = expensive() if options.recompute_keep is None else operators(options.recompute_keep)
    recompute = Recompute(keep if options.recompute == "selective" else None, moment)
    by_parts = (
        exchanging if options.recompute == "selective" and options.recompute_keep is None else ()
    )
    found = options.recompute == "none"
    for index, block in enumerate(blocks):
        parts = parts_of(block, by_parts) if options.recomputes(index) else []
        found = found or bool(parts)
        if parts:
            _require_no_statistics(block)
        for part in parts:
            if part is not block:
                specialize(
                    part, ProcessedBlock, block_process=_Process(recompute, inside=options.compile)
                )
        whole = recompute if block in parts else None
        if whole or options.offload_activations or options.compile:
            process = _Process(
                whole,
                offload=options.offload_activations,
                compile=options.compile,
                compiler=compiler,
            )
            specialize(block, ProcessedBlock, block_process=process)
    if not found:
        raise ConfigError(
            "recompute=selective found nothing to recompute without sending messages again. Use"
            " recompute=full, or list in recompute_keep the operators whose results are kept."
        )


def _require_no_statistics(block: nn.Module) -> None:
    """Refuse running means, which a second forward would update a second time."""
    for name, module in block.named_modules():
        if getattr(module, "track_running_stats", False):
            raise ConfigError(
                f"'{name}' ({type(module).__name__}) in a block updates its running statistics in"
                " every forward. A recomputed block runs its forward twice, so it would update"
                " them twice. Remove recompute, or use a norm without running statistics."
            )


class ProcessedBlock:
    """Mixin between a block's own forward and the gate of the pipeline: runs the forward through
    `block_process`."""

    block_process: _Process

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if not self.block_process.inside:
            args, kwargs = _without_cache(args, kwargs)
        return self.block_process(super().forward, args, kwargs)  # type: ignore[misc]


class _Process:
    """Runner of a forward that is compiled, recomputed, and offloads its saved tensors, as the
    options ask.

    Args:
        inside: whether this is a part of a compiled block, which has removed the key-value cache.
        compiler: see `process_blocks`.
    """

    def __init__(
        self,
        recompute: Recompute | None,
        *,
        offload: bool = False,
        compile: bool = False,
        inside: bool = False,
        compiler: Callable[..., Any] | None = None,
    ) -> None:
        self.inside = inside
        self._recompute = recompute
        self._offload = offload
        self._compile = compile
        self._compiler = compiler
        self._compiled: Callable[..., Any] | None = None

    def __call__(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # no context manager, because an attention that is recomputed runs this inside a compiled
        # block
        if not self._offload:
            return self._run(forward, args, kwargs)
        with SavedOnHost(forward.__self__):  # type: ignore[attr-defined]
            return self._run(forward, args, kwargs)

    def _run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        block: nn.Module = forward.__self__  # type: ignore[attr-defined]
        if not self._compile:
            return self._recomputing(block, forward, args, kwargs)
        # the compiler must see which operators are kept
        within = self._recompute is not None and self._recompute.keeps
        if self._compiled is None:
            whole = (
                (lambda *args, **kwargs: self._recomputing(block, forward, args, kwargs))
                if within
                else forward
            )
            self._compiled = (self._compiler or torch.compile)(whole)
        return (
            self._compiled(*args, **kwargs)
            if within
            else self._recomputing(block, self._compiled, args, kwargs)
        )

    def _recomputing(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._recompute is None:
            return forward(*args, **kwargs)
        return self._recompute(forward, args, kwargs, block)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Process:
        """A copied block compiles its own forward."""
        return _Process(
            self._recompute,
            offload=self._offload,
            compile=self._compile,
            inside=self.inside,
            compiler=self._compiler,
        )


def _without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove the key-value cache of Transformers, which training does not need and a second forward
    would fill twice.

    Raises:
        ConfigError: it holds something.
    """
    named = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if named.get("use_cache"):
        named["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), named


def _is_cache(value: Any) -> bool:
    if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
        return False
    if value.get_seq_length() > 0:
        raise ConfigError(
            "The model was called with a key-value cache that is not empty (a trained prefix?)."
            " Recomputed or compiled blocks cannot train with such a cache. Remove recompute,"
            " offload_activations and compile."
        )
    return True


# `torch.compile` of blocks: check of the machine, and warnings about graph breaks.


class Compilation:
    """The compilation of the blocks of one model.

    Args:
        device: device that the blocks run on.
        schedule: pipeline schedule.
        blocks: number of blocks in the model.
        in_order: whether operators run in the order of the code, so that work that overlaps with
            messages stays between their start and end, also where another order would need less
            memory.

    Raises:
        ConfigError: no C++ compiler (on the CPU) or no Triton (on CUDA).
    """

    def __init__(
        self, device: torch.device, schedule: str, blocks: int, *, in_order: bool = False
    ) -> None:
        names = (os.environ.get("CXX"), "g++", "clang++", "c++")
        if device.type == "cpu" and not any(shutil.which(name) for name in names if name):
            raise ConfigError(
                "On the CPU, compile=true needs a C++ compiler. Install g++ or clang++, or use"
                " compile=false."
            )
        if device.type == "cuda" and importlib.util.find_spec("triton") is None:
            raise ConfigError(
                "compile=true on CUDA needs the package triton. Install it with pip install triton,"
                " or use compile=false."
            )
        if find_schedule(schedule).split_backward:
            allow_second_backward()
        if in_order:
            keep_order_in_graphs()
        allow_notes_in_recomputation()
        # each block may be of a different kind, and the last batch may have another shape
        allow_graphs(2 * blocks)
        self._before = graph_breaks()
        self._uncompiled = uncompiled_frames()

    @property
    def graph_breaks(self) -> dict[str, int]:
        """Number of graph breaks inside blocks since this object was made, by reason; counted in
        every function around them too."""
        return dict(graph_breaks() - self._before)

    def warn(self) -> None:
        """Warn about graph breaks, which cost speed."""
        found = self.graph_breaks
        if found:
            reasons = "; ".join(
                f"{reason.strip().splitlines()[0]} ({count} times)"
                for reason, count in found.items()
            )
            rank_zero_warn(
                "compile=true: the compiled blocks are slower than they could be, because they"
                f" have graph breaks: {reasons}."
            )
        uncompiled = uncompiled_frames() - self._uncompiled
        if uncompiled > 0 and not found:
            blocks = "block" if uncompiled == 1 else "blocks"
            rank_zero_warn(
                f"compile=true: {uncompiled} {blocks} could not be compiled. Training continues"
                " without compiling them. See torch's log for the reason."
            )
