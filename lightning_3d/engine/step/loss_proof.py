"""The first steps of a fit prove their loss: that of a micro-batch is the weighted mean of those of
two parts of its rows, whatever the step has written before.

Where a batch is split (into micro-batches, or over data-parallel ranks), only such a loss is
trained as one process trains it. Batches 1, 2, 4 and 8 are proved: a loss that compares a model
with a copy of it shows nothing in the first one, and other rows show more.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from math import gcd, isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.compat.batches import move_data_to_device
from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.engine.step.batch_layers import (
    BufferWrites,
    about_counters,
    about_writes,
    refuse_layers,
)
from lightning_3d.engine.step.looks import (
    DrawsOfPart,
    FirstLook,
    HostDraws,
    Start,
    aside,
    most_telling,
    tolerance_of,
)
from lightning_3d.engine.step.loss_finding import (
    Finding,
    Number,
    about_logs,
    differing_logs,
    refusal,
)
from lightning_3d.engine.step.micro_batches import MicroBatches
from lightning_3d.engine.step.runner import Called, StepRunner
from lightning_3d.engine.step.written import (
    ParameterWrites,
    accumulated_numbers,
    digests,
    first_rows_refusal,
    state_refusal,
    weight_refusal,
)
from lightning_3d.errors import ConfigError
from lightning_3d.options.script import SplitBatch
from lightning_3d.parallel.mesh import Mesh, gathered
from lightning_3d.parallel.nested import count_rows, joined, rows_of, tensors_of
from lightning_3d.parallel.pipeline.engine import ProbeFailed
from lightning_3d.parallel.zero import DataParallelBackend

_MOST_AS_ONE = 8
"""Micro-batches whose rows are compared as one where a part of a micro-batch fails alone."""

_PROVED = (1, 2, 4, 8)
"""Numbers of the batches whose loss is proved."""

_AS_ONE = (2, 8)
"""Those in which two micro-batches are compared as one."""

_NEEDS_GRAPH = "does not require grad"
"""What torch says where a step calls `torch.autograd.grad` and nothing has recorded what it
differentiates."""

_QUIET = "quiet"
"""A reason why the loss is not compared, of which nobody needs to know."""


class LossProof:
    """Compares the loss of a micro-batch with those of its parts, in a few of the first steps of a
    fit. Each costs one forward of a micro-batch.

    Args:
        module: the user's module.
        runner: runs its step.
        backend: its parameters.
        split_batch: the user's own split of a batch.
        wanted: whether to compare; False where the user has declared what the loss is.
        records: whether a first look at the operations of a micro-batch is possible; not in
            compiled blocks.
        epsilon: machine epsilon of the arithmetic, as far as the precision of the run says.
        keeps_parameters: whether parameters stay as they are in a step (not gathered, as with ZeRO
            3).
        splits: whether to look for layers that a split batch changes; not in a dry run.
        accumulates: whether the user wants the gradients of micro-batches, whatever the loss is.
        quietly: function that makes a context in which loggers get nothing.
    """

    def __init__(
        self,
        module: nn.Module,
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
        quietly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.module, self.runner, self.backend = module, runner, backend
        self.mesh, self.device = mesh, device
        self.split_batch, self.records, self.epsilon = split_batch, records, epsilon
        self.wanted, self.keeps_parameters = wanted, keeps_parameters
        self.splits, self.accumulates, self.quietly = splits, accumulates, quietly
        self.batch = sys.maxsize
        self.scale = 0.0
        self.told: set[str] = set()

    @property
    def is_first(self) -> bool:
        """Whether the batch is the first of a fit."""
        return self.batch == 1

    def begin_fit(self) -> None:
        """Expect the first batch of a fit."""
        self.batch, self.scale = 0, 0.0
        self.told.clear()

    @contextmanager
    def watching(
        self, batch: Any, micro_batches: MicroBatches, rest: tuple[Any, ...], step: int
    ) -> Iterator[None]:
        """Context of the computation of a batch. Afterwards the loss is proved, if it is due.
        Collective.

        Raises:
            ConfigError: on all ranks, if it is not a mean over rows, or depends on what the step
                has written in earlier calls.
        """
        self.batch += 1
        real = len(micro_batches) - micro_batches.fillers
        due = self.splits and self.batch in _PROVED and (self.is_first or self.wanted)
        if not due or (real == 1 and self.mesh.size("dp") == 1):
            yield
            return
        if self.is_first and not self.accumulates:
            refuse_layers(self.module, self.mesh, real, micro_batches.rows)
        writes = BufferWrites(self.module)
        if self.wanted:
            watch = _Watch(
                self,
                batch,
                micro_batches,
                rest,
                step,
                self._chosen(batch, micro_batches, max(real, 1)),
            )
            with watch.looking():
                yield
            watch.prove()
        else:
            yield
        written = (
            [name for names in gathered(writes.names(), self.mesh) for name in names]
            if self.is_first
            else []
        )
        if written:
            rank_zero_warn(about_writes(list(dict.fromkeys(written))))

    def _chosen(self, batch: Any, micro_batches: MicroBatches, real: int) -> int:
        """Choose the micro-batch that is proved: the one that tells most, of single rows the first
        of two."""
        if micro_batches.rows > 1 or real == 1 or self.split_batch is not None:
            return most_telling(micro_batches.batches[:real], micro_batches.rows, self.mesh)
        rows = count_rows(batch)
        return most_telling(
            [rows_of(batch, slice(first, first + 2), rows) for first in range(real - 1)],
            2,
            self.mesh,
        )


class _Watch:
    """One comparison.

    Args:
        index: the micro-batch that is compared with its parts.
    """

    def __init__(
        self,
        proof: LossProof,
        batch: Any,
        micro_batches: MicroBatches,
        rest: tuple[Any, ...],
        step: int,
        index: int,
    ) -> None:
        self._proof, self._rest, self._step, self._index = proof, rest, step, index
        self._module, self._runner, self._mesh = proof.module, proof.runner, proof.mesh
        self._whole_batch, self._batches = batch, micro_batches
        self._real = len(micro_batches) - micro_batches.fillers
        self._first: Start | None = None
        self._before: Start | None = None
        self._writes = ParameterWrites(self._module, wanted=proof.keeps_parameters)
        self._looks: dict[int, FirstLook] = {}
        self._host = HostDraws()
        # what was written before the micro-batch that is compared
        self._earlier: dict[str, Any] = {}
        self._runs_whole = self._unpaired = self._graph = False
        self._own_rows = True  # whether the rows that are compared are this rank's

    # While the step runs

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at micro-batches while they run."""
        before, self._runner.look = self._runner.look, self._look
        self._runner.communicates = False
        try:
            yield
        finally:
            self._runner.look = before

    @contextmanager
    def _look(self, stage: int, index: int) -> Iterator[None]:
        with self._writes.watching(index):
            if index == 0 and self._first is None:
                self._first = Start(self._module, self._proof.device)
            if index != self._index:
                yield
                return
            if self._before is None:
                self._before = Start(self._module, self._proof.device) if index else self._first
                self._earlier = self._first.written() if self._first is not None else {}
                self._versions = self._count_writes()
            with self._record(stage):
                yield

    def _count_writes(self) -> tuple[int, int]:
        return _writes(tensors_of(self._batches.batches[self._index])), _writes(
            self._module.parameters()
        )

    @contextmanager
    def _record(self, stage: int, index: int = 0) -> Iterator[None]:
        with (
            self._looks.setdefault(stage, FirstLook()) if self._proof.records else nullcontext(),
            self._host.of_whole(stage),
        ):
            yield

    # Afterwards

    def prove(self) -> None:
        """Compare, on every rank, and refuse a loss that is not a mean, or depends on earlier
        calls."""
        for find, refuse in (
            (lambda: self._writes.again, weight_refusal),
            (self._set_from_rows, first_rows_refusal),
        ):
            names = [name for of_rank in gathered(find(), self._mesh) for name in of_rank]
            if names:
                raise ConfigError(refuse(names, self._mesh.layout, self._real, self._batches.rows))
        reasons = [one for one in gathered(self._reason(), self._mesh) if one]
        # A resumed fit may begin with the last batch of an epoch, of which some ranks have fewer
        # rows: they would compare in another way.
        unequal = len(set(gathered((self._batches.rows, self._real), self._mesh))) > 1
        if (
            not reasons
            and self._mesh.size("dp") > 1
            and (unequal or not self._proof.keeps_parameters or self._mesh.layout.ep > 1)
        ):
            reasons = self._take_rows_of_first()
        if reasons:
            self._say_why_not(min(reasons, key=lambda one: one == _QUIET))
            return
        assert self._before is not None
        with self._before.coming_back():
            written = self._before.written()
            set_once = [
                name
                for name, value in self._earlier.items()
                if isinstance(value, Tensor) and name not in written
            ]
            # from the rows of an earlier micro-batch, for example the entries of a codebook
            if any(gathered(bool(set_once), self._mesh)):
                self._before, self._runs_whole = self._first, True
            found = self._compare()
            if found is not None and any(gathered(self._may_matter(written), self._mesh)):
                self._compare_again(found)

    def _set_from_rows(self) -> list[str]:
        """Names of this rank's parameters to which the first call gives other values where it has
        other rows. Collective."""
        mine = self._writes.writes, self._runner.communicates, self._real
        writes, communicates, real = zip(*gathered(mine, self._mesh), strict=True)
        if not any(writes) or any(communicates) or len(set(real)) > 1:
            return []
        if self._real == 1:
            return self._unlike_peers(self._writes.once)
        assert self._first is not None
        with self._first.coming_back(), self._writes.first_again() as differing:
            self._tried(
                partial(
                    self._probe, self._batches.batches[1], self._batches.rows, _no_look, self._first
                )
            )
        return differing

    def _reason(self) -> str:
        """Say why there is nothing to compare on this rank; empty where there is."""
        layout = self._mesh.layout
        communicates = self._runner.communicates
        # only users communicate
        if (
            layout.world_size == self._mesh.size("dp")
            and self._proof.keeps_parameters
            and layout.ep == 1
        ):
            communicates = communicates or any(look.communicates for look in self._looks.values())
        if (communicates and layout.world_size > 1) or self._batches.is_filler(0):
            return _QUIET
        batches, parameters = self._count_writes()
        if batches != self._versions[0]:
            return "the step writes into its batch"
        if self._proof.keeps_parameters and (
            self._writes.writes or parameters != self._versions[1]
        ):
            return "the step writes into parameters"
        return ""

    def _take_rows_of_first(self) -> list[str]:
        """Take the rows of the first data-parallel rank where ranks exchange parameters or tokens
        in a forward, so that a step that fails with fewer rows fails on all of them, at the same
        place. Returns why that is impossible."""
        sent: list[Any] = [None]
        if self._mesh.rank == 0:
            with suppress(Exception):
                sent = [
                    pickle.dumps(
                        move_data_to_device((self._whole_batch, self._batches.batches), "cpu")
                    )
                ]
        sent += [self._batches.rows, self._batches.fillers, self._index]
        dist.broadcast_object_list(sent, 0, group=self._mesh.world_control)
        if sent[0] is None:
            return ["a batch cannot be sent to other ranks"]
        whole, batches = move_data_to_device(pickle.loads(sent[0]), self._proof.device)
        self._whole_batch, self._batches, self._index = (
            whole,
            MicroBatches(tuple(batches), sent[1], sent[2]),
            sent[3],
        )
        self._real = len(batches) - sent[2]
        self._own_rows = self._mesh.index("dp") == 0
        return []

    def _say_why_not(self, reason: str) -> None:
        if self._mesh.rank == 0 and reason != _QUIET and self._proof.is_first:
            print(
                "lightning_3d: the loss of the first step was not compared with that of parts of"
                f" its rows: {reason}.",
                file=sys.stderr,
                flush=True,
            )

    # Parts of the rows

    def _compare(self) -> list[Finding | None] | None:
        """Return what each rank has found; None if there is nothing to compare.

        Raises:
            ConfigError: the loss is not a mean.
        """
        failure, found = "", None
        for way in self._ways():
            tried = gathered(self._tried(way), self._mesh)
            failures = [failed for _, failed in tried if failed]
            if failures:
                failure = failure or failures[0]
                continue
            found = [one for one, _ in tried]
            if any(one.tells for one in found if one is not None):
                break
        if found is None:
            self._say_why_not(failure)
            return None
        self._tell_of_logs(found)
        differing = [one for one in found if one is not None and one.differs]
        if not differing:
            return found
        paired = [one for one in differing if not one.unpaired]
        if not paired:
            self._say_why_not("parts of a micro-batch draw other random numbers than the whole")
            return None
        raise ConfigError(
            refusal(
                max(paired, key=lambda one: one.difference),
                self._mesh.layout,
                self._real,
                self._batches.rows,
            )
        )

    def _tell_of_logs(self, found: list[Finding | None]) -> None:
        """Warn once of logged numbers that are not as on one process."""
        others = {
            log[0]: log
            for one in found
            if one is not None and not one.differs
            for log in one.logged
        }
        new = [log for name, log in others.items() if name not in self._proof.told]
        self._proof.told |= others.keys()
        if new:
            rank_zero_warn(about_logs(new, self._mesh.layout, self._real, self._batches.rows))

    def _ways(self) -> list[Callable[[], Finding | None]]:
        """Ways to compare, the best first: in every other comparison, two micro-batches as one,
        because other rows may differ in what counts.

        Parts without a common divisor of their rows have equal shares of what some rows have (a
        label, for example) only if all rows have it or none. A few layers cannot train on a single
        row, and a single row may have no label: then several micro-batches are compared with their
        rows as one, because two of them may have equal shares, or halves.
        """
        rows, several = self._batches.rows, self._real > 1
        if rows == 1:
            return [partial(self._as_one, 2) if several else self._rows_of_two_ranks]
        if self._proof.split_batch is not None:
            count = next(number for number in range(2, rows + 1) if rows % number == 0)
            return [partial(self._parts, [rows // count] * count)]
        uneven = next(size for size in range(rows // 2, 0, -1) if gcd(size, rows) == 1)
        # a failure between the first and the last stage would end the run
        fails_alone = uneven == 1 and self._mesh.size("pp") > 2
        ways: list[Callable[[], Finding | None]] = (
            [] if fails_alone else [partial(self._parts, [rows - uneven, uneven])]
        )
        if several and self._proof.batch in _AS_ONE:
            ways.insert(0, partial(self._as_one, 2))
        elif several:
            ways.append(partial(self._as_one, 2 if fails_alone else _MOST_AS_ONE))
        halves = rows // 2
        return (
            [*ways, partial(self._parts, [rows - halves, halves])]
            if halves not in (1, uneven)
            else ways
        )

    def _tried(self, way: Callable[[], Any]) -> tuple[Any, str]:
        """Return what a way gives, or why it fails."""
        try:
            quietly = aside(
                self._module, self._runner, self._proof.quietly(), eager=not self._proof.records
            )
            with torch.no_grad(), quietly, self._proof.backend.parameters_in_use():
                found = way()
                # Rows may belong together, such as pairs, so that a part alone has no loss; a
                # micro-batch must have one.
                alone = (
                    isinstance(found, Finding)
                    and sum(found.rows) == self._batches.rows
                    and isfinite(found.whole.loss)
                )
                return (
                    (None, "it is not finite for some parts alone")
                    if alone and not isfinite(found.mean)
                    else (found, "")
                )
        except ProbeFailed as error:
            if (
                _NEEDS_GRAPH in str(error)
                and not self._graph
                and self._mesh.size("pp") == 1
                and self._proof.keeps_parameters
            ):
                self._graph = True
                return self._tried(way)
            return None, f"the step fails with other rows ({error})"

    def _parts(self, sizes: list[int]) -> Finding | None:
        """Compare a micro-batch with parts of its rows."""
        batch, rows = self._batches.batches[self._index], self._batches.rows
        if self._proof.split_batch is not None:
            parts = list(self._proof.split_batch(batch, len(sizes)))
        else:
            parts = [
                rows_of(batch, slice(0, sizes[0]), rows),
                rows_of(batch, slice(sizes[0], rows), rows),
            ]
        return (
            self._compared(batch, parts, sizes)
            if self._runs_whole
            else self._find(self._runner.called(self._index), parts, sizes)
        )

    def _as_one(self, most: int) -> Finding | None:
        """Compare the rows of up to `most` micro-batches as one with the micro-batches, among them
        the one that is chosen."""
        rows, split = self._batches.rows, self._proof.split_batch
        count = min(most, self._real)
        if split is not None:
            count = max(
                (part for part in range(2, count + 1) if self._real % part == 0), default=self._real
            )
            whole, first = split(self._whole_batch, self._real // count)[0], 0
        else:
            first = min(self._index, self._real - count)
            whole = rows_of(
                self._whole_batch,
                slice(first * rows, (first + count) * rows),
                count_rows(self._whole_batch),
            )
        return self._compared(
            whole, list(self._batches.batches[first : first + count]), [rows] * count
        )

    def _rows_of_two_ranks(self) -> Finding | None:
        """Compare the only rows of two data-parallel ranks with each of them."""
        layout, control = self._mesh.layout, self._mesh.world_control
        parts: list[Any] = []
        for index in range(2):
            source = next(
                rank for rank in range(layout.world_size) if layout.coordinates(rank)["dp"] == index
            )
            sent = [
                (
                    move_data_to_device(self._batches.batches[0], "cpu")
                    if self._mesh.rank == source
                    else None
                )
            ]
            dist.broadcast_object_list(sent, source, group=control)
            parts.append(move_data_to_device(sent[0], self._proof.device))
        return self._compared(joined(parts), parts, [1, 1])

    def _compared(self, whole: Any, parts: list[Any], sizes: list[int]) -> Finding | None:
        self._looks = {}
        return self._find(self._probe(whole, sum(sizes), self._record), parts, sizes)

    def _find(self, whole: Called | None, parts: list[Any], sizes: list[int]) -> Finding | None:
        shapes = (
            {stage: look.shapes for stage, look in self._looks.items()}
            if self._proof.records
            else None
        )
        self._unpaired = self._host.unpaired = False
        first, found = 0, []
        for part, size in zip(parts, sizes, strict=True):
            draws = DrawsOfPart(slice(first, first + size), sum(sizes), shapes, self._host)
            self._last = part, size, draws
            called = self._probe(part, size, draws)
            found += [called] if called is not None else []
            self._unpaired = self._unpaired or draws.unpaired
            first += size
        if whole is None or not self._own_rows:
            return None
        cp, tolerance = self._mesh.size("cp"), self._tolerance()
        numbers = tuple(Number.of(called.sums, cp) for called in found)
        logged = (
            ()
            if self._unpaired
            else differing_logs(whole.logged, [called.logged for called in found], tolerance)
        )
        finding = Finding(
            Number.of(whole.sums, cp),
            numbers,
            tuple(sizes),
            tolerance,
            self._unpaired,
            self._proof.scale,
            logged,
        )
        self._proof.scale = max(self._proof.scale, finding.scale)
        return finding

    def _tolerance(self) -> float:
        epsilons = [look.epsilon for look in self._looks.values()]
        if not self._proof.records:  # nothing has seen the types of the results
            epsilons.append(torch.finfo(torch.float32).eps)
        return tolerance_of(max([self._proof.epsilon, *epsilons]), self._proof.device)

    def _probe(
        self,
        batch: Any,
        rows: int,
        look: Callable[[int, int], Any],
        start: Start | None = None,
        *,
        draws_only: bool = False,
    ) -> Called | None:
        """Run the step on some rows.

        Args:
            start: the state from which it runs; by default that of the micro-batch that is
                compared.
            draws_only: whether only its random numbers are the same.

        Raises:
            ProbeFailed: on all ranks, if it fails on one: no rank goes on to the next part while
                another waits.
        """
        start, called, failure = start or self._before, None, ""
        assert start is not None
        start.restore(draws_only=draws_only)
        self._runner.look = partial(_with_graph, look) if self._graph else look
        try:
            called = self._runner.probe(
                MicroBatches((batch,), rows), self._batches, self._rest, self._step, self._index
            )
        except ProbeFailed as error:
            failure = str(error)
        except Exception as error:
            if self._mesh.size("pp") > 1 and not self._runner.owns_last:
                raise
            failure = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        failures = [one for one in gathered(failure, self._mesh) if one]
        if failures:
            raise ProbeFailed(failures[0])
        return called

    # Earlier calls

    def _may_matter(self, written: dict[str, Any]) -> bool:
        """Return whether the step has written something that is not as on one process. Collective.

        With one micro-batch, data-parallel ranks write as often as one process: only what differs
        between them matters.
        """
        return bool(written) if self._real > 1 else bool(self._unlike_peers(written))

    def _unlike_peers(self, values: dict[str, Any]) -> list[str]:
        """Names of values that differ between data-parallel ranks. Collective."""
        mine = {
            axis: index
            for axis, index in self._mesh.layout.coordinates(self._mesh.rank).items()
            if axis != "dp"
        }
        everyone = gathered(digests(values), self._mesh)
        peers = [
            one
            for rank, one in enumerate(everyone)
            if _is_at(self._mesh.layout.coordinates(rank), mine)
        ]
        names = dict.fromkeys(name for one in peers for name in one)
        return [name for name in names if len({one.get(name) for one in peers}) > 1]

    def _compare_again(self, found: list[Finding | None]) -> None:
        """Compare the loss of a part with that of a second call, from the state that the first call
        has left.

        Raises:
            ConfigError: it is another one.
        """
        own = found[self._mesh.rank]
        tried = gathered(self._tried(partial(self._again, own)), self._mesh)
        if any(failed for _, failed in tried):
            return
        changes = [one for one, _ in tried if one is not None]
        names = list(dict.fromkeys(name for written, _, _ in changes for name in written))
        pairs = [pair for _, _, pair in changes if pair is not None]
        if pairs:
            raise ConfigError(
                state_refusal(names, pairs[0], self._mesh.layout, self._real, self._batches.rows)
            )
        counters = list(dict.fromkeys(name for _, numbers, _ in changes for name in numbers))
        if counters and self._real > 1:
            rank_zero_warn(about_counters(counters, self._real))

    def _again(
        self, found: Finding | None
    ) -> tuple[list[str], list[str], tuple[float, float] | None]:
        """Run the last part once more. Returns the names of what a call writes, of numbers that
        each call changes, and the losses of both calls where they differ."""
        assert self._before is not None
        places, (part, size, draws) = self._before.places, self._last
        written, first = self._before.written(), places.now()
        called = self._probe(part, size, draws.again(), draws_only=True)
        losses = None
        if found is not None and called is not None:
            one, other = found.parts[-1], Number.of(called.sums, self._mesh.size("cp"))
            if found.differ(one.loss, other.loss):
                losses = one.loss, other.loss
        return list(written), accumulated_numbers(places.changed(first, places.now())), losses


@contextmanager
def _with_graph(look: Callable[[int, int], Any], stage: int, index: int) -> Iterator[None]:
    with torch.enable_grad(), look(stage, index):
        yield


def _no_look(stage: int, index: int) -> AbstractContextManager[None]:
    return nullcontext()


def _is_at(coordinates: dict[str, int], wanted: dict[str, int]) -> bool:
    return all(coordinates[axis] == index for axis, index in wanted.items())


def _writes(tensors: Iterable[Tensor]) -> int:
    """Count the writes into tensors."""
    return sum(0 if tensor.is_inference() else tensor._version for tensor in tensors)
