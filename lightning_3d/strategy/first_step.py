"""Explains errors of the user's code up to the first optimizer step, where a layout may be the
reason for them."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_3d.compat.memory_errors import is_out_of_memory
from lightning_3d.engine.own_code import Line, lines_of, own_line
from lightning_3d.errors import FirstStepError, Lightning3DError
from lightning_3d.layout.layout import Layout
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.ranks.failure import cause_of, is_lost_peer

if TYPE_CHECKING:
    from lightning_3d.engine.built_model import BuiltModel

TRACEBACK_VARIABLE = "LIGHTNING_3D_TRACEBACK"
"""Environment variable that adds the traceback to a message that has none."""


class FirstStep:
    """The time from the begin of a fit until the first batch after its first optimizer step.

    What only the layout causes is seen then. Later, the same code has run before.
    """

    def __init__(self) -> None:
        self._runs = self._stepped = False

    def begin(self, *, fitting: bool) -> None:
        """Expect the first step of a fit, or an evaluation without one."""
        self._runs, self._stepped = fitting, False

    def begin_batch(self) -> None:
        """Note that a batch of training begins."""
        self._runs = self._runs and not self._stepped

    def end_step(self) -> None:
        """Note that the optimizer has stepped."""
        self._stepped = True

    def explain(
        self, error: BaseException, mesh: Mesh | None, built: BuiltModel | None, zero_stage: int
    ) -> FirstStepError | None:
        """Return an error that explains one of the user's code; None for all others. Local.

        Args:
            built: the model of this rank; None before it is built.
        """
        if not self._runs or mesh is None or not _may_be_of_layout(error):
            return None
        line, differences = own_line(error), _differences(error, mesh, built, zero_stage)
        if line is None or not differences:
            return None
        layout, ranks = mesh.layout, mesh.layout.world_size
        where = f" with {layout} (rank {mesh.rank} of {ranks})" if ranks > 1 else ""
        in_step = built is not None and line.frame.f_locals.get("self") is built.module
        lines = [
            f"{line.function} fails in the first step{where}:",
            f"  {line.file}:{line.number}",
            *([f"    {line.code}"] if line.code else []),
            *(f"  {text}" for text in _what(error, line, notes=not in_step)),
            "What differs from one process:",
            *(f"  - {text}" for text in differences),
            _advice(layout, built),
        ]
        if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            lines += traceback.format_exception(error)
        explained = FirstStepError("\n".join(lines).rstrip())
        explained.__cause__ = error
        return explained


def _may_be_of_layout(error: BaseException) -> bool:
    """Whether an error may be the consequence of a layout: none of this package, of a machine, or
    of a rank that is gone."""
    of_machine = isinstance(error, OSError) or is_out_of_memory(error) or "CUDA error" in str(error)
    known = isinstance(cause_of(error), Lightning3DError)
    return isinstance(error, Exception) and not (of_machine or known or is_lost_peer(error))


def _what(error: BaseException, line: Line, *, notes: bool) -> Iterator[str]:
    """Lines with the type and the text of an error, and where it was raised.

    Args:
        notes: whether to show what was added to the error: it is about the code of the model.
    """
    texts = [
        f"{type(error).__name__}: {error}",
        *(getattr(error, "__notes__", ()) if notes else ()),
    ]
    yield from (text.strip().replace("\n", "\n  ") for text in texts)
    raised = list(lines_of(error))[-1]
    if raised.frame is not line.frame:
        yield f"raised at {raised}"


def _differences(
    error: BaseException, mesh: Mesh, built: BuiltModel | None, zero_stage: int
) -> list[str]:
    """List what the user's code finds here, and does not find on one process."""
    layout = mesh.layout
    found: list[str] = []
    if built is not None:
        found += _shard(error, built)
        found += _rows(built)
    if layout.pp > 1:
        found.append(
            f"With pp = {layout.pp}, this rank has the parameters of pipeline rank"
            f" {mesh.index('pp')}. Others have no values here, their .grad is None, and attributes"
            " that other stages write are missing. Only the last stage has the model's output."
        )
    if layout.cp > 1:
        found.append(
            f"With cp = {layout.cp}, the model's layers get 1/{layout.cp} of the tokens of each"
            " row."
        )
    if layout.dp > 1:
        found.append(
            f"With dp = {layout.dp}, this rank reads 1/{layout.dp} of the rows of a global batch."
        )
    if zero_stage > 0 and layout.dp > 1:
        values = (
            ", and parameters have no values outside of the calls of their layers"
            if zero_stage == 3
            else ""
        )
        found.append(
            f"With zero_stage={zero_stage}, the reduced gradients are not in .grad{values}."
        )
    return found


def _shard(error: BaseException, built: BuiltModel) -> Iterator[str]:
    """Name a parameter of which this rank has a part: the one that the error is most likely
    about."""
    cut = {name: spec for name, spec in built.parts.specs.items() if spec.is_cut}
    if not cut:
        return
    numbers = {int(number) for number in re.findall(r"\d+", str(error))}

    def likely(spec: ShardSpec) -> int:
        return len(numbers & set(spec.local_shape)) + len(numbers & set(spec.global_shape))

    name = max(cut, key=lambda one: likely(cut[one]))
    here, whole = tuple(cut[name].local_shape), tuple(cut[name].global_shape)
    yield (
        f"This rank has shards of parameters: '{name}' has the shape {here} here, and {whole} in"
        " the whole model."
    )


def _rows(built: BuiltModel) -> Iterator[str]:
    """Say how many rows a step gets."""
    rows, count, entries = built.split
    if count > 1:
        yield (
            f"training_step gets {rows} of the {rows * count} rows of this rank's batch at a time,"
            f" in {count} micro-batches: {entries}. If one of these belongs to all rows, split the"
            " batch by a function of your own (split_batch=)."
        )


def _advice(layout: Layout, built: BuiltModel | None) -> str:
    """Say how to find out whether the layout is the reason, and which layouts have fewer
    differences."""
    ways = []
    if layout.tp * layout.pp * layout.cp * layout.ep > 1:
        ways.append(f"the layout dp{layout.world_size}, where every rank has the whole model")
    rows, count, _ = built.split if built is not None else (1, 1, "")
    if layout.pp == 1 and count > 1:
        ways.append(f"micro_batch_size={rows * count}, a micro-batch of all rows")
    instead = f" Otherwise use {' or '.join(ways)}." if ways else ""
    return (
        'Run the script with Trainer(strategy="auto", devices=1): if it fails there too, repair'
        " that line." + instead + " Compare both with"
        f" `lightning-3d verify SCRIPT`. {TRACEBACK_VARIABLE}=1 shows the traceback."
    )
