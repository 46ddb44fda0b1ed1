"""The first step of a fit proves its loss: that of a micro-batch is the weighted mean of those of two parts of its rows.

Where a batch is split (into micro-batches, or over data-parallel ranks), only such a loss is trained as one process trains it.
"""

from __future__ import annotations

import io
import random
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from math import gcd, isfinite
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_3d.errors import ConfigError, listed, plural
from lightning_3d.layout.layout import Layout
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.nested import count_rows, rows_of, tensors_of
from lightning_3d.parallel.pipeline.engine import ProbeFailed
from lightning_3d.parallel.undone import hooks_undone
from lightning_3d.parallel.zero import DataParallelBackend
from lightning_3d.strategy.step.again import Buffers, Generators
from lightning_3d.strategy.step.attributes import Attributes
from lightning_3d.strategy.step.batch_layers import BufferWrites, about_writes, layers_of_whole_batches
from lightning_3d.strategy.step.metrics import unchanged_metrics
from lightning_3d.strategy.step.micro_batches import MicroBatches, SplitBatch
from lightning_3d.strategy.step.row_random import DrawnShapes, RowDraws, Shape
from lightning_3d.strategy.step.runner import StepRunner

_TOLERANCES = ((1e-12, 1e-9), (1e-6, 1e-4), (1e-3, 3e-3), (1.0, 3e-2))
"""Largest machine epsilon of the arithmetic, and the relative difference that its rounding may make in a mean over some rows: float64,
float32, TF32, and what has fewer bits."""

_TF32 = 2.0**-11

_QUIET = "quiet"
"""A reason why the loss is not compared, of which nobody needs to know."""


class _FirstLook(DrawnShapes):
    """Records of a micro-batch, while it runs, what draws random numbers and how exact its arithmetic is.

    Attributes:
        epsilon: largest machine epsilon of any result.
        communicates: whether it sends to other ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epsilon = 0.0
        self.communicates = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            self.epsilon = max(self.epsilon, torch.finfo(result.dtype).eps)
        self.communicates = self.communicates or getattr(func, "namespace", "") == "c10d"
        return result


@dataclass(frozen=True)
class _State:
    """What a step changes besides gradients, at the time of creation."""

    generators: Generators
    buffers: Buffers
    attributes: Attributes

    @staticmethod
    def of(module: LightningModule, device: torch.device) -> _State:
        buffers = Buffers(module)
        buffers.remember()
        return _State(Generators(device), buffers, Attributes(module))

    def restore(self) -> None:
        self.attributes.restore()
        self.buffers.restore()
        self.generators.restore()


@dataclass(frozen=True)
class _Number:
    """A loss and its weight, in rows or target tokens."""

    loss: float
    weight: float

    @staticmethod
    def of(sums: Tensor, cp: int) -> _Number:
        total, weight = sums.tolist()
        return _Number(total / weight if weight > 0 else 0.0, weight * cp)


@dataclass(frozen=True)
class Finding:
    """The loss of some rows, and the losses of parts of them, on the rank that computed them.

    Attributes:
        rows: rows of each part.
        tolerance: relative difference that rounding may make.
        unpaired: whether parts may have drawn other random numbers than the whole.
    """

    whole: _Number
    parts: tuple[_Number, ...]
    rows: tuple[int, ...]
    tolerance: float
    unpaired: bool = False

    @property
    def mean(self) -> float:
        """Weighted mean of the parts."""
        weight = sum(part.weight for part in self.parts)
        return sum(part.loss * part.weight for part in self.parts) / weight if weight > 0 else self.whole.loss

    @property
    def differs(self) -> bool:
        """Whether the loss is not a mean."""
        losses = [self.whole.loss, *(part.loss for part in self.parts)]
        if not all(map(isfinite, losses)):
            return False  # the guard of losses that are not finite has a better message
        scale = max(map(abs, losses))
        return abs(self.whole.loss - self.mean) > self.tolerance * (scale + min(1e-2, self.tolerance))

    @property
    def lost(self) -> list[float]:
        """Losses of parts that are not finite, where that of the whole is: of a variance over one row, for example."""
        return [part.loss for part in self.parts if not isfinite(part.loss) and isfinite(self.whole.loss)]

    @property
    def is_sum(self) -> bool:
        """Whether the whole is the sum of its parts."""
        total = sum(part.loss for part in self.parts)
        return abs(self.whole.loss - total) <= self.tolerance * max(abs(self.whole.loss), abs(total))


class _HostDraws:
    """Draws from the generators of Python and numpy in a step, which have no rows."""

    def __init__(self) -> None:
        self._whole: dict[int, tuple[Hashable, Hashable]] = {}
        self.unpaired = False

    @contextmanager
    def of_whole(self, stage: int) -> Iterator[None]:
        """Context of the step on the whole."""
        before = self._state()
        yield
        self._whole[stage] = before, self._state()

    @contextmanager
    def of_part(self, stage: int) -> Iterator[None]:
        """Context of the step on a part."""
        before = self._state()
        yield
        after = self._state()
        if (before != after or self._draws(stage)) and self._whole.get(stage) != (before, after):
            self.unpaired = True

    def _draws(self, stage: int) -> bool:
        before, after = self._whole.get(stage, (None, None))
        return before != after

    def _state(self) -> Hashable:
        numpy = sys.modules.get("numpy")
        state = numpy.random.get_state() if numpy is not None else ()
        return random.getstate(), tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


class _Draws:
    """The look at a part: it draws the random numbers that its rows have in the whole.

    Args:
        shapes: for each stage, what the whole has drawn; None where that is unknown.
    """

    def __init__(self, rows: slice, total: int, shapes: dict[int, list[Shape]] | None, host: _HostDraws) -> None:
        self._rows, self._total, self._shapes, self._host = rows, total, shapes, host
        self._draws: list[RowDraws] = []

    @contextmanager
    def __call__(self, stage: int, index: int) -> Iterator[None]:
        shapes = None if self._shapes is None else self._shapes.get(stage, [])
        draws = RowDraws(self._rows, self._total, shapes)
        self._draws.append(draws)
        with draws, self._host.of_part(stage):
            yield

    @property
    def unpaired(self) -> bool:
        """Whether some numbers may be others than in the whole."""
        return self._host.unpaired or any(draws.unmatched or (self._shapes is None and draws.drawn) for draws in self._draws)


class LossProof:
    """Compares, in the first step of each fit, the loss of a micro-batch with those of its parts. Costs one forward of a micro-batch.

    Args:
        module: the user's module.
        runner: runs its step.
        backend: its parameters.
        split_batch: the user's own split of a batch.
        wanted: whether to compare; False where the user has declared what the loss is.
        records: whether a first look at the operations of a micro-batch is possible; not in compiled blocks.
        epsilon: machine epsilon of the arithmetic, as far as the precision of the run says.
        keeps_parameters: whether parameters stay as they are in a step (not gathered, as with ZeRO 3).
        splits: whether to look for layers that a split batch changes; not in a dry run.
        accumulates: whether the user wants the gradients of micro-batches, whatever the loss is.
    """

    def __init__(
        self,
        module: LightningModule,
        runner: StepRunner,
        backend: DataParallelBackend,
        mesh: Mesh,
        device: torch.device,
        *,
        split_batch: SplitBatch | None,
        wanted: bool,
        records: bool,
        epsilon: float,
        keeps_parameters: bool,
        splits: bool,
        accumulates: bool,
    ) -> None:
        self._module, self._runner, self._backend = module, runner, backend
        self._mesh, self._device = mesh, device
        self._split_batch, self._records, self._epsilon = split_batch, records, epsilon
        self.wanted, self.keeps_parameters = wanted, keeps_parameters
        self.splits, self.accumulates = splits, accumulates
        self._due = False

    def begin_fit(self) -> None:
        """Expect the first step of a fit."""
        self._due = True

    @contextmanager
    def watching(self, batch: Any, micro_batches: MicroBatches, rest: tuple[Any, ...], step: int) -> Iterator[None]:
        """Context of the computation of a batch. Afterwards the loss is proved, if it is due. Collective.

        Raises:
            ConfigError: on all ranks, if it is not a mean over rows.
        """
        due, self._due = self._due, False
        real = len(micro_batches) - micro_batches.fillers
        if not due or not self.splits or (real == 1 and self._mesh.size("dp") == 1):
            yield
            return
        self._refuse_layers(real, micro_batches.rows)
        writes = BufferWrites(self._module)
        if self.wanted:
            with self._proving(batch, micro_batches, rest, step):
                yield
        else:
            yield
        written = [name for names in gathered(writes.names(), self._mesh) for name in names]
        if written:
            rank_zero_warn(about_writes(list(dict.fromkeys(written))))

    def _refuse_layers(self, real: int, rows: int) -> None:
        """Refuse layers that need the whole batch, unless the user wants the gradients of micro-batches."""
        if self.accumulates:
            return
        dp = self._mesh.size("dp")
        found = gathered(layers_of_whole_batches(self._module, micro_batches=real, dp=dp), self._mesh)
        layers = list(dict.fromkeys(layer for of_rank in found for layer in of_rank))
        if layers:
            raise ConfigError(
                f"{described(dp, real, rows)}, but {listed(layers)}. So this would not train as one process does. Use"
                f" {at_once(self._mesh.layout, dp * real * rows)}, remove the option, or pass"
                ' loss_reduction="accumulate" to train with the values of micro-batches.'
            )

    @contextmanager
    def _proving(self, batch: Any, micro_batches: MicroBatches, rest: tuple[Any, ...], step: int) -> Iterator[None]:
        real = len(micro_batches) - micro_batches.fillers
        watch = _Watch(self, batch, micro_batches, rest, step)
        with watch.looking():
            yield
        watch.prove(real)


class _Watch:
    """One comparison."""

    def __init__(self, proof: LossProof, batch: Any, micro_batches: MicroBatches, rest: tuple[Any, ...], step: int) -> None:
        self._proof, self._rest, self._step = proof, rest, step
        self._module, self._runner, self._mesh = proof._module, proof._runner, proof._mesh
        self._before = _State.of(self._module, proof._device)
        self._whole_batch, self._batches = batch, micro_batches
        kept = micro_batches.batches[: 1 if micro_batches.rows > 1 else 2]
        self._kept = tuple(kept)
        self._versions = _writes(tensors_of(kept)), _writes(self._module.parameters())
        self._looks: dict[tuple[int, int], _FirstLook] = {}
        self._host = _HostDraws()
        self._unpaired = False

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the first micro-batches while they run."""
        before, self._runner.look = self._runner.look, self._look
        self._runner.communicates = False
        try:
            yield
        finally:
            self._runner.look = before

    @contextmanager
    def _look(self, stage: int, index: int) -> Iterator[None]:
        if index >= len(self._kept):
            yield
            return
        with self._looks.setdefault((stage, index), _FirstLook()) if self._proof._records else nullcontext(), self._host.of_whole(stage):
            yield

    def prove(self, real: int) -> None:
        """Compare, on every rank, and refuse a loss that is not a mean."""
        reason = self._reason(real)
        reasons = [one for one in gathered(reason, self._mesh) if one]
        if reasons:
            self._say_why_not(min(reasons, key=lambda one: one == _QUIET))
            return
        after = _State.of(self._module, self._proof._device)
        for sizes in self._ways():
            found = gathered(self._try(sizes, after), self._mesh)
            failures = [failed for _, failed in found if failed]
            if not failures:
                break
        if failures:
            self._say_why_not(failures[0])
            return
        differing = [one for one, _ in found if one is not None and one.differs]
        if not differing:
            return
        if all(one.unpaired for one in differing):
            self._say_why_not("parts of a micro-batch draw other random numbers than the whole")
            return
        worst = max((one for one in differing if not one.unpaired), key=lambda one: abs(one.whole.loss - one.mean))
        raise ConfigError(refusal(worst, self._mesh.layout, real, self._batches.rows))

    def _ways(self) -> list[list[int]]:
        """Sizes of the parts, the best first.

        Parts without a common divisor of their rows have equal shares of what some rows have (a label, for example) only if all rows have
        it or none. A few layers cannot train on a single row: then halves are compared.
        """
        rows = self._batches.rows
        if rows == 1:
            return [[1, 1]]
        if self._proof._split_batch is not None:
            count = next(number for number in range(2, rows + 1) if rows % number == 0)
            return [[rows // count] * count]
        first = next(size for size in range(rows // 2, 0, -1) if gcd(size, rows) == 1)
        halves = [rows - rows // 2, rows // 2]
        if first == halves[1] or (first == 1 and self._mesh.size("pp") > 2):
            return [halves]  # a failure between the first and the last stage would end the run
        return [[rows - first, first], halves]

    def _try(self, sizes: list[int], after: _State) -> tuple[Finding | None, str]:
        """Compare parts of these sizes. Returns what was found, or why they cannot be compared."""
        finding, failure = None, ""
        try:
            with self._aside():
                finding = self._compare(sizes)
        except Exception as error:
            if not (isinstance(error, ProbeFailed) or self._mesh.size("pp") == 1 or self._runner.owns_last):
                raise
            failure = f"the step fails with fewer rows ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
        finally:
            after.restore()
        if finding is not None and finding.lost:
            failure = f"it is {finding.lost[0]:g} for some parts alone"
        return finding, failure

    def _reason(self, real: int) -> str:
        """Say why there is nothing to compare on this rank; empty where there is."""
        batches, parameters = self._versions
        if self._runner.communicates or any(look.communicates for look in self._looks.values() if self._only_users_communicate):
            return _QUIET
        if self._batches.is_filler(0) or (self._batches.rows == 1 and real < 2):
            return _QUIET
        if _writes(tensors_of(self._kept)) != batches:
            return "the step writes into its batch"
        if self._proof.keeps_parameters and _writes(self._module.parameters()) != parameters:
            return "the step writes into parameters"
        return ""

    @property
    def _only_users_communicate(self) -> bool:
        return self._mesh.layout.world_size == self._mesh.size("dp") and self._proof.keeps_parameters and self._mesh.layout.ep == 1

    def _say_why_not(self, reason: str) -> None:
        if self._mesh.rank == 0 and reason != _QUIET:
            print(
                f"lightning_3d: the loss of the first step was not compared with that of parts of its rows: {reason}.",
                file=sys.stderr,
                flush=True,
            )

    # The parts

    def _compare(self, sizes: list[int]) -> Finding | None:
        rows, self._unpaired = self._batches.rows, False
        self._host.unpaired = False
        if rows > 1:
            batch = self._kept[0]
            if self._proof._split_batch is not None:
                parts = list(self._proof._split_batch(batch, len(sizes)))
            else:
                parts = [rows_of(batch, slice(0, sizes[0]), rows), rows_of(batch, slice(sizes[0], rows), rows)]
            whole = self._runner.own_sums[:1]
            shapes = {stage: look.shapes for (stage, index), look in self._looks.items() if index == 0}
        else:
            parts = list(self._kept)
            self._looks = {}
            whole = self._probe(self._two_rows(), 2, self._look)
            shapes = {stage: look.shapes for (stage, _), look in self._looks.items()}
        first, found = 0, []
        for part, size in zip(parts, sizes, strict=True):
            draws = _Draws(slice(first, first + size), sum(sizes), shapes if self._proof._records else None, self._host)
            found += self._probe(part, size, draws)
            self._unpaired = self._unpaired or draws.unpaired
            first += size
        if not whole:
            return None
        cp, numbers = self._mesh.size("cp"), tuple(_Number.of(sums, self._mesh.size("cp")) for sums in found)
        return Finding(_Number.of(whole[0], cp), numbers, tuple(sizes), self._tolerance(), self._unpaired)

    def _two_rows(self) -> Any:
        """The first two rows of the batch as one micro-batch."""
        rows = count_rows(self._whole_batch) if self._proof._split_batch is None else len(self._batches)
        if self._proof._split_batch is not None:
            return self._proof._split_batch(self._whole_batch, rows // 2)[0]
        return rows_of(self._whole_batch, slice(0, 2), rows) if rows > 2 else self._whole_batch

    def _probe(self, batch: Any, rows: int, look: Callable[[int, int], Any]) -> list[Tensor]:
        """Run the step on a part of a micro-batch, from the same state as its micro-batch."""
        self._before.restore()
        self._runner.look = look
        sums = self._runner.probe(MicroBatches((batch,), rows), self._batches, self._rest, self._step)
        return [] if sums is None else [sums]

    def _tolerance(self) -> float:
        epsilon = max([self._proof._epsilon, *(look.epsilon for look in self._looks.values())])
        if not self._proof._records:  # nothing has seen the types of the results
            epsilon = max(epsilon, torch.finfo(torch.float32).eps)
        if epsilon < _TF32 and self._proof._device.type == "cuda" and epsilon > 1e-12 and torch.backends.cuda.matmul.allow_tf32:
            epsilon = _TF32
        return next(tolerance for largest, tolerance in _TOLERANCES if epsilon <= largest)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Context in which nothing reaches the user: no metric, log, print or warning."""
        trainer, look = self._module.trainer, self._runner.look
        loggers = trainer.loggers
        eager = nullcontext() if self._proof._records else torch.compiler.set_stance("force_eager")
        try:
            trainer.loggers = [DummyLogger() for _ in loggers]
            quiet = redirect_stdout(io.StringIO())
            with unchanged_metrics(self._module), hooks_undone(self._module), quiet, warnings.catch_warnings(), eager:
                warnings.simplefilter("ignore")
                with self._proof._backend.parameters_in_use():
                    yield
        finally:
            trainer.loggers, self._runner.look = loggers, look


def epsilon_of(precision: str, *, fp8: bool = False) -> float:
    """Return the machine epsilon of the arithmetic of a precision; 0 for one that the results themselves show."""
    if fp8:
        return 0.125
    return torch.finfo(torch.bfloat16).eps if precision.startswith("bf16") else 0.0


def gathered(value: Any, mesh: Mesh) -> list[Any]:
    """Gather a value of each rank on all of them, in host memory."""
    if mesh.layout.world_size == 1:
        return [value]
    values: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(values, value, group=mesh.world_control)
    return values


def at_once(layout: Layout, rows: int) -> str:
    """Say what computes a global batch at once."""
    axes = [f"{axis} = 1" for axis in ("pp", "dp") if getattr(layout, axis) > 1]
    return f"a layout with {listed(axes)} and micro_batch_size={rows}" if axes else f"micro_batch_size={rows}"


def _writes(tensors: Iterable[Tensor]) -> int:
    """Count the writes into tensors."""
    return sum(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def refusal(found: Finding, layout: Layout, micro_batches: int, rows: int) -> str:
    """Explain why a loss is not trained as one process trains it, and what works.

    Args:
        micro_batches: of each data-parallel rank.
        rows: of a micro-batch.
    """
    dp = layout.dp
    wholes = plural(sum(found.rows), "row")
    losses = " and ".join(f"{part.loss:.6g} for {plural(size, 'row')}" for part, size in zip(found.parts, found.rows, strict=True))
    looks = (
        "It looks like a sum over rows."
        if found.is_sum
        else "It looks like a loss that compares the rows of a batch, or divides by something else than their number: contrastive pairs,"
        " class weights, rows without a label, mixup, a variance or a root of a mean, batch statistics (BatchNorm)."
    )
    declare = (
        'Pass loss_reduction="sum" to the strategy'
        if found.is_sum
        else 'Let training_step return {"loss": loss, "loss_weight": n}, where n is what the loss is divided by (labels, sum of class'
        ' weights), if there is such a number. Or pass loss_reduction="accumulate" to train the mean over micro-batches, as gradient'
        " accumulation does, and DDP over its ranks"
    )
    whole = at_once(layout, dp * micro_batches * rows)
    return (
        f"The loss of training_step is not a mean over rows: it is {found.whole.loss:.6g} for {wholes} together, but {losses}, whose"
        f" weighted mean is {found.mean:.6g}. {described(dp, micro_batches, rows)}, so this would train another loss than one process."
        f" {looks} {declare}. Or use {whole}, which computes the global batch at once. See docs/your_model.md."
    )


def described(dp: int, micro_batches: int, rows: int) -> str:
    """Describe how a global batch is split."""
    return f"The global batch of {plural(dp * micro_batches * rows, 'row')} is split into {_parts(dp, micro_batches, rows)}"


def summary(dp: int, micro_batches: int, rows: int, accumulated: int = 1) -> str:
    """Summarize how a global batch is split, for the start of a fit."""
    batches = f"{accumulated} batches x " if accumulated > 1 else ""
    total = plural(accumulated * dp * micro_batches * rows, "row")
    return f"global batch {total}: {batches}{_parts(dp, micro_batches, rows)}"


def _parts(dp: int, micro_batches: int, rows: int) -> str:
    ranks = f"{plural(dp, 'data-parallel rank')} x " if dp > 1 else ""
    split = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    return f"{ranks}{split} of {plural(rows, 'row')}"
