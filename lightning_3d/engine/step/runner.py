"""Runs the user's step over the micro-batches of one batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.torch import watching_world_collectives
from lightning_3d.engine.step.activation_hooks import ActivationHooks
from lightning_3d.engine.step.carried_attributes import CarriedAttributes
from lightning_3d.engine.step.checks import agree_about_logs
from lightning_3d.engine.step.logs import StepLog
from lightning_3d.engine.step.loss_scale import LossScale
from lightning_3d.engine.step.loss_weights import LossWeights
from lightning_3d.engine.step.metrics import share_metrics, unchanged_metrics
from lightning_3d.engine.step.micro_batches import MicroBatches, merge_outputs
from lightning_3d.engine.step.outside_reads import OutsideReads
from lightning_3d.engine.step.rank_zero_uses import RankZeroUses
from lightning_3d.engine.step.stage_attributes import StageAttributes
from lightning_3d.engine.step.stage_outputs import StageOutputs
from lightning_3d.engine.step.totals import BatchTotals
from lightning_3d.engine.step.tracer import StepTracer
from lightning_3d.errors import ConfigError, listed
from lightning_3d.health.slow_ranks import SlowRank
from lightning_3d.layout.micro_batch_rows import MicroBatchRows
from lightning_3d.parallel.collectives import all_reduce_flat
from lightning_3d.parallel.context import forget_masks
from lightning_3d.parallel.deferred_logits import computing_what_is_kept
from lightning_3d.parallel.expert import Routers, RouterStatistics, RouterSums
from lightning_3d.parallel.host_copy import HostCopy
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline import PipelineEngine, first_unknown
from lightning_3d.parallel.random_streams import RandomState
from lightning_3d.parallel.zero import DataParallelBackend
from lightning_3d.tracing.trace import REDUCE, StepTrace

LOSS_WEIGHT = "loss_weight"
"""Key under which a training step returns the weight of its loss."""


@dataclass(frozen=True)
class Computed:
    """What forward, backward and reduction of a batch give, besides gradients; the same on every
    rank. Reading a number waits for the device, so nothing is read before all work of the step is
    under way.

    Attributes:
        read_totals: function that reads the sums over all micro-batches and ranks.
        mean_loss: mean over the global batch, on the device, float64, shape ().
        finite: whether it and that of all earlier batches of the step are finite, on the device,
            shape (). A batch without any target counts as finite.
        own_sums: (loss times weight, weight, scaled weight) of each micro-batch of this rank, on
            the device; none before the last stage.
        sums_of_routers: statistics of the routers of a mixture of experts.
    """

    read_totals: Callable[..., BatchTotals]
    mean_loss: Tensor
    finite: Tensor
    own_sums: tuple[Tensor, ...] = ()
    sums_of_routers: RouterSums | None = None

    @cached_property
    def totals(self) -> BatchTotals:
        """Sums over all micro-batches and ranks.

        Raises:
            ConfigError: ranks logged different names.
        """
        return self.read_totals()

    @property
    def routers(self) -> RouterStatistics | None:
        """Statistics of the routers of a mixture of experts; None for a dense model."""
        return (
            self.sums_of_routers.read(self.totals.weight)
            if self.sums_of_routers is not None
            else None
        )

    def is_lost_here(self) -> bool:
        """Return whether this rank's own part of the loss is not finite; False before the last
        stage. Waits for the device."""
        return bool(self.own_sums) and not bool(torch.stack(self.own_sums).isfinite().all())


class StepResult:
    """The numbers of one optimizer step, or of one of the batches that accumulate for it; the same
    on every rank.

    Whoever asks for `loss`, `weight`, `grad_norm` or `routers` first waits until the device has
    computed them.

    Args:
        computed: what the batch has given.
        read_norm: function that reads the gradient norm of the step; None where further batches of
            it follow.

    Attributes:
        trace: trace of the step; None where it was not traced. Only rank 0 has its events.
        skipped: whether the optimizer skipped the step, because loss or norm is not finite.
        slowest: the rank that computes longest compared with its peers; None where that is not
            known.
    """

    def __init__(self, computed: Computed, read_norm: Callable[[], float] | None) -> None:
        self._computed, self._read_norm = computed, read_norm
        self.trace: StepTrace | None = None
        self.skipped = False
        self.slowest: SlowRank | None = None

    @cached_property
    def loss(self) -> float:
        """Mean over the global batch (per target token, or per row where the loss did not come
        through `loss_function`)."""
        return self._computed.totals.mean_loss

    @cached_property
    def weight(self) -> float:
        """Target tokens (or rows) of the global batch."""
        return self._computed.totals.weight

    @cached_property
    def grad_norm(self) -> float | None:
        """Norm of all gradients before clipping; None where further batches of the step follow,
        without waiting."""
        return self._read_norm() if self._read_norm is not None else None

    @cached_property
    def routers(self) -> RouterStatistics | None:
        """Statistics of the routers of a mixture of experts, whose losses are not in `loss`."""
        return self._computed.routers

    @property
    def tokens(self) -> float:
        """Target tokens (or rows) of the global batch."""
        return self.weight

    def read(self) -> None:
        """Read all numbers while they are there: the gradient norm is gone when the next step
        begins. Waits for the device."""
        _ = self.loss, self.weight, self.routers, self.grad_norm


@dataclass(frozen=True)
class Called:
    """What a call of the step on some rows gave.

    Attributes:
        sums: (loss times weight, weight), float64.
        logged: by name, how values are combined, the value and its weight.
    """

    sums: Tensor
    logged: dict[str, tuple[str, Tensor, Tensor]]


class StepRunner:
    """Drives engine, loss weights, log and gradients through one step.

    Args:
        module: the user's module.
        engine: the pipeline schedule.
        mesh: process groups.
        weights: weight of the micro-batch that is running.
        random: random streams of dropout.
        device: device of this rank.
        context: function that makes a precision context for a call of the user's step, by hook
            name.
        after_first_backward: function that is called once, when the first step has its unreduced
            gradients.
        routers: routers of a mixture of experts.
        tracer: tracer of the step, which the caller begins.
        rows: how the rows of a global batch are dealt to ranks; None deals them one by one.
        reads: sees parameters that the step reads outside of the model; None where nobody looks.
        looks_at_attributes: whether to refuse a step that carries values in attributes from call to
            call.

    Attributes:
        carried: sees these attributes.
        inside: whether the user's step is running, which not all ranks run equally often: it must
            not communicate.
        around: function that makes a context for each call of the user's step: (hook,
            micro-batches, index) -> context.
        look: function that makes a context inside it, by stage and micro-batch.
        communicates: whether the user's step has communicated through the strategy.
        scale: what losses are divided by before their backward.
        activations: the user's hooks on gradients of activations.
        totals: totals of the last batch over all ranks; None before the first.
        known_totals: totals of every batch in a dry run, on a rank that does not compute them: the
            ranks that do are absent.
    """

    totals: BatchTotals | None = None
    known_totals: BatchTotals | None = None

    def __init__(
        self,
        module: nn.Module,
        engine: PipelineEngine,
        mesh: Mesh,
        weights: LossWeights,
        random: RandomState,
        device: torch.device,
        context: Callable[[str], AbstractContextManager[Any]],
        after_first_backward: Callable[[], None] | None = None,
        routers: Routers | None = None,
        tracer: StepTracer | None = None,
        rows: MicroBatchRows | None = None,
        reads: OutsideReads | None = None,
        looks_at_attributes: bool = False,
    ) -> None:
        self._reads = reads
        self.carried = CarriedAttributes(module, mesh.layout, wanted=looks_at_attributes)
        self._tracer = tracer or StepTracer()
        self._module = module
        self._engine = engine
        self._mesh = mesh
        self._rows = rows or MicroBatchRows(mesh.size("dp"), mesh.size("dp"))
        self._weights = weights
        self._random = random
        self._device = device
        self._context = context
        self.after_first_backward = after_first_backward
        self._routers = routers
        self.scale = LossScale(mesh, weights, device)
        self.activations = ActivationHooks(module, self.scale, mesh)
        self._log = StepLog(module, mesh, engine.last_rank, device)
        self._shared = StageOutputs(mesh, engine, device)
        self._uses = RankZeroUses(module, mesh, engine)
        self.left = StageAttributes(module, mesh, engine, device)
        self.around: Callable[[str, MicroBatches, int], AbstractContextManager[Any]] = _no_context
        self.look: Callable[[int, int], AbstractContextManager[Any]] = _no_context
        self.inside = self.communicates = False
        self._runs_step = False
        self._gathers_part = ""
        if routers is not None:
            routers.equal_weights = weights.equal
        share_metrics(module, mesh, engine.last_rank, self.refuse_inside)
        self._accumulated: tuple[Tensor, Tensor] | None = None
        self._finite: Tensor | None = None
        self._sums: list[Tensor] = []
        self._outputs: list[tuple[Any, Tensor]] = []

    def compute(
        self,
        micro_batches: MicroBatches,
        rest: tuple[Any, ...],
        backend: DataParallelBackend,
        step: int,
        *,
        place: int = 0,
        ends: bool = True,
        of: int | None = 1,
    ) -> Computed:
        """Run forward and backward of one batch, and after the last batch of an optimizer step
        reduce the gradients.

        The reduced gradients are those of the mean loss over all batches of the step, see
        `LossScale`.

        Args:
            rest: further arguments of the user's step.
            backend: gradients and parameters of the data-parallel ranks.
            step: number of optimizer steps before this one.
            place: index of this batch among those of the step.
            ends: whether it is the last of them.
            of: number of batches that accumulate for a step; None runs a step again.
        """
        backend.find_hooks()
        if place == 0 and of is not None:
            self.scale.begin_step(micro_batches, of, first=step == 0)
        self.scale.begin_batch(micro_batches, begins=place == 0)
        with backend.gradient_scope(
            begins=place == 0, ends=ends, overlap=self.after_first_backward is None
        ):
            self._begin(step, place, training=True)
            with self._random.isolated(), backend.parameters_in_use():
                self._engine.train(
                    len(micro_batches),
                    micro_batches.signature,
                    _UserStep(self, "training", micro_batches, rest),
                )
            forget_masks()  # no backward needs them any more
            # Before the reduction: it compares the unreduced gradients of tensor-parallel ranks.
            if self.after_first_backward is not None:
                self.after_first_backward()
                self.after_first_backward = None
            packed = self._share()
            copy = HostCopy(packed)
            mean_loss = BatchTotals.mean_in(packed)
            routers = self._routers.finish() if self._routers is not None else None
            weight = BatchTotals.weight_in(packed)
            scaled = BatchTotals.scaled_in(packed)
            if place and self._accumulated is not None:
                weight = weight + self._accumulated[0]
                scaled = scaled + self._accumulated[1]
            self._accumulated = weight, scaled
            finite = ~(BatchTotals.weight_in(packed) > 0) | mean_loss.isfinite()
            self._finite = finite & self._finite if place and self._finite is not None else finite
            if ends:
                self._reduce(backend, place + 1)
        return Computed(
            partial(self._read, copy, begins=place == 0, ends=ends),
            mean_loss,
            self._finite,
            tuple(self._sums),
            routers,
        )

    def end_step(self, backend: DataParallelBackend, batches: list[Computed]) -> Computed:
        """Reduce the gradients of a step whose last batch was not known to be the last.

        Args:
            batches: all batches of the step, in order.

        Returns:
            The last batch, as the last one.
        """
        with backend.gradient_scope(begins=False, overlap=False):
            self._reduce(backend, len(batches))
        last = batches[-1]
        return replace(last, read_totals=partial(last.read_totals, ends=True))

    def _reduce(self, backend: DataParallelBackend, batches: int) -> None:
        """Reduce the gradients of a step of so many batches. Only now is its weight known, by which
        they are divided."""
        assert self._accumulated is not None
        weight, scaled = self._accumulated
        factor = self.scale.end_step(weight, scaled, batches)
        self._tracer.before_reduction(backend)
        with self._tracer.recorder.span(REDUCE):
            backend.reduce(factor)

    def outputs(self, micro_batches: MicroBatches, computed: Computed) -> dict[str, Any]:
        """Return what the user's `training_step` returned for the batch that was computed last: on
        the last stage all, elsewhere only the loss. Local."""
        outputs = self._merged(micro_batches) or {}
        if LOSS_WEIGHT in outputs:
            outputs[LOSS_WEIGHT] = torch.stack(
                [sums[1] for sums in self._sums]
            ).sum() * self._mesh.size("cp")
        outputs["loss"] = computed.mean_loss.to(torch.get_default_dtype())
        return outputs

    def report(self, computed: Computed, outputs: dict[str, Any]) -> None:
        """Log what the batch that was computed last has logged, on every rank, and complete its
        `outputs` with the scalars of the last stage. Waits for the device."""
        totals = computed.totals
        self._log.replay(totals.checksum)
        if totals.extras:
            outputs.update(
                {**self._shared.broadcast(outputs, whole=False), "loss": outputs["loss"]}
            )

    def report_early(self, outputs: dict[str, Any]) -> None:
        """Do what `report` does for a batch that others of its step follow, without waiting for the
        device. All that the host must know before, the ranks tell each other in host memory."""
        extras = {key: value for key, value in outputs.items() if key != "loss"}
        own = self._log.checksum() if self._engine.owns_last else None
        checksum, most = agree_about_logs(own, self._shared.count(extras), self._mesh)
        self._log.replay(checksum, waits=False)
        if most > 0:
            outputs.update(self._shared.share(extras, most))

    def evaluate(self, hook: str, micro_batches: MicroBatches, rest: tuple[Any, ...]) -> Any:
        """Run the forward of one batch. `hook` is "validation", "test" or "predict".

        Returns:
            What the user's step returned, joined over micro-batches. Predictions go to every rank
            of the pipeline; of other outputs the ranks before the last stage get the scalars.
        """
        self._begin(step=0)
        self.left.begin_batch(hook)
        with self._random.isolated():
            self._engine.evaluate(
                len(micro_batches),
                (hook, rest[1:], micro_batches.signature),
                _UserStep(self, hook, micro_batches, rest),
            )
        forget_masks()
        # data-parallel ranks may have different numbers of batches to predict
        if hook != "predict":
            self._log.replay(self._read(HostCopy(self._share())).checksum)
        return self._shared.broadcast(self._merged(micro_batches), whole=hook == "predict")

    def probe(
        self, part: MicroBatches, like: MicroBatches, rest: tuple[Any, ...], step: int, index: int
    ) -> Called | None:
        """Run the forward of the user's training step once more, without gradients. Logs, outputs
        and totals stay as they are.

        Args:
            part: a single micro-batch.
            like: micro-batches of the step.
            step: number of optimizer steps before this one.
            index: the one of `like` whose seeds `part` gets.

        Returns:
            What it gives; None before the last stage.
        """
        kept = self._sums, self._outputs, self._log
        self._sums, self._outputs, self._log = [], [], self._log.empty()
        self._step = step
        if self._routers is not None:
            self._routers.begin(training=False)
        self._engine.probes = True
        try:
            with self._random.isolated():
                self._engine.evaluate(
                    1,
                    ("probe", part.signature),
                    _UserStep(self, "training", part, rest, like, index),
                )
            return self.called(0)
        finally:
            forget_masks()
            self._engine.probes = False
            self._sums, self._outputs, self._log = kept

    @property
    def owns_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self._engine.owns_last

    def called(self, index: int) -> Called | None:
        """Return what the step gave for a micro-batch of the batch that ran last; None before the
        last stage."""
        return (
            Called(self._sums[index][:2], self._log.values_of(index, len(self._sums)))
            if self._sums
            else None
        )

    def _merged(self, micro_batches: MicroBatches) -> Any:
        """Join what the user's step returned for the batch; None before the last stage and where it
        returned nothing."""
        kept = [
            pair for index, pair in enumerate(self._outputs) if not micro_batches.is_filler(index)
        ]
        if not kept or kept[0][0] is None:
            return None
        outputs, weights = zip(*kept, strict=True)
        return merge_outputs(outputs, weights)

    def _begin(self, step: int, place: int = 0, *, training: bool = False) -> None:
        self._step, self._place = step, place
        if self._routers is not None:
            equalizer = 1.0 if self._weights.counts_targets else self.scale.equalizer
            self._routers.begin(training=training, scale=self.scale.inverse * equalizer)
        self._sums, self._outputs = [], []
        self._log.begin()

    def run_one(
        self,
        hook: str,
        micro_batches: MicroBatches,
        index: int,
        rest: tuple[Any, ...],
        like: MicroBatches | None = None,
        first: int = 0,
    ) -> Tensor | None:
        """Call the user's step on one micro-batch. Returns the weighted loss; before the last stage
        the call ends in a boundary.

        Args:
            like: where the loss is compared with that of the step: micro-batches of the step, which
                has the same random numbers.
            first: the one of them that the first of `micro_batches` takes the place of.
        """
        self._weights.begin(training=hook == "training", proves=like is not None)
        filler = micro_batches.is_filler(index)
        if self._routers is not None:
            self._routers.expect(micro_batches.rows, filler=filler)
        self.inside = self._mesh.size("pp") > 1 or (
            self._mesh.size("dp") > 1 and len(micro_batches) > 1
        )
        self._gathers_part = self._why_no_gather(len(micro_batches))
        try:
            self._runs_step = True
            with ExitStack() as contexts:
                for context in self._contexts(
                    hook, like or micro_batches, first + index, filler=filler
                ):
                    contexts.enter_context(context)
                output = getattr(self._module, f"{hook}_step")(micro_batches.batches[index], *rest)
            self._engine.end_step()
            for unknown in first_unknown(output):
                unknown.pass_over()
        except RuntimeError as error:
            self._explain_shape(error)
            raise
        finally:
            self.inside = self._runs_step = False
            self._gathers_part = ""
        declared = (
            output.get(LOSS_WEIGHT) if hook == "training" and isinstance(output, Mapping) else None
        )
        weight = self._weights.weight(micro_batches.rows, self._device, declared)
        if filler:
            weight = torch.zeros_like(weight)
        self._log.weigh(weight)
        return self._account(hook, output, weight)

    def _contexts(
        self, hook: str, micro_batches: MicroBatches, index: int, *, filler: bool
    ) -> Iterator[AbstractContextManager[Any]]:
        """Contexts of a call of the user's step, the outermost first."""
        yield self._context(hook)
        yield self._log.collecting()
        yield self._uses.watching()
        if hook == "training" and not self._engine.probes:
            yield self.carried.watching(len(micro_batches), micro_batches.rows)
        # Before the last stage, code after a call of the model would update metrics with values
        # that are not known there.
        if filler or self._engine.passes_calls:
            yield unchanged_metrics(self._module)
        if hook != "training" and self._engine.passes_calls and self._engine.owns_last:
            yield self.left.unchanged()
        yield computing_what_is_kept()
        if hook == "training":
            yield self.activations.watching(micro_batches)
        yield self.around(hook, micro_batches, index)
        yield self.look(self._engine.stage, index)
        if self._mesh.layout.world_size > 1 and self._gathers_part:
            yield watching_world_collectives(partial(self.refuse_inside, gathers=True))
        if self._reads is not None:
            yield self._reads.watching()

    def _explain_shape(self, error: RuntimeError) -> None:
        """Add the most frequent cause of a wrong shape to an error, where tensor parallelism has
        sharded layers."""
        tp = self._mesh.size("tp")
        if tp > 1 and re.search(
            r"is invalid for input of size|must match the size|shapes cannot be multiplied|doesn't"
            r" match",
            str(error),
        ):
            error.add_note(
                f"With tp {tp}, a rank has 1/{tp} of the output of a column-parallel layer. Code"
                " between it and the row-parallel layer must read sizes, such as the number of"
                " heads, from the tensors. Write x.unflatten(-1, (-1, head_width)) instead of"
                " x.view(batch, length, heads, head_width), and x.flatten(-2) after the attention."
                " See docs/your_model.md."
            )

    def _why_no_gather(self, micro_batches: int) -> str:
        """Say why a gather over all ranks would not collect the rows of the global batch, once
        each; empty if it would."""
        shared = [
            f"{axis} = {self._mesh.size(axis)}"
            for axis in ("tp", "cp", "pp")
            if self._mesh.size(axis) > 1
        ]
        reasons = [f"with {listed(shared)} several ranks work on the same rows"] if shared else []
        if micro_batches > 1:
            reasons.append(f"the step sees one of {micro_batches} micro-batches at a time")
        return " and ".join(reasons)

    def refuse_inside(self, what: str, *, gathers: bool = False) -> None:
        """Refuse communication of the user's own inside a step: some ranks would wait for others
        forever, or get other rows than they expect.

        Args:
            gathers: whether the result depends on which ranks have which rows.

        Raises:
            ConfigError: the user's step is running.
        """
        self.communicates = self.communicates or self._runs_step
        if gathers and self._gathers_part:
            dp = self._mesh.layout.world_size
            raise ConfigError(
                f"The step communicates with all ranks ({what}), but {self._gathers_part}: it would"
                " not get each row of the global batch once, as with data parallelism alone. Use"
                f" the layout dp{dp} and micro_batch_size=None, a micro-batch of all rows. Log"
                " numbers with self.log, log metric objects, or communicate at the end of the"
                " epoch."
            )
        if self.inside:
            raise ConfigError(
                f"The step communicates with all ranks ({what}), but runs once per micro-batch and"
                " stage, so some ranks would run it more often than others and wait forever. Log"
                " numbers with self.log, log metric objects, or communicate at the end of the"
                " epoch."
            )

    def seed(self, micro_batches: MicroBatches, index: int) -> None:
        """Set the random state of this rank's part of a micro-batch, which no other part of the
        step shares, before it runs."""
        number = self._rows.number(self._mesh.index("dp"), index, len(micro_batches))
        part = (self._place * self._rows.total(len(micro_batches)) + number) * self._mesh.size(
            "cp"
        ) + self._mesh.index("cp")
        self._random.begin(self._step, part)
        if self._routers is not None:
            self._routers.enter(index)

    def _account(self, hook: str, output: Any, weight: Tensor) -> Tensor | None:
        """Keep what the last stage produced. Returns the loss times its weight, to be
        differentiated.

        Context-parallel ranks compute the same loss, and each counts 1/cp of it.
        """
        if hook != "training":
            self._outputs.append((output, weight))
            return None
        loss = _loss_of(output)
        extras = (
            {k: _detached(v) for k, v in output.items() if k != "loss"}
            if isinstance(output, Mapping)
            else {}
        )
        self._outputs.append((extras, weight))
        weight = weight / self._mesh.size("cp")
        counted = torch.where(
            weight > 0, loss.detach().to(torch.float64) * weight, torch.zeros_like(weight)
        )
        seed = weight * self.scale.inverse
        if self._weights.known:
            seed = seed * self.scale.equalizer
        seed = seed.to(loss.dtype)
        self._sums.append(torch.stack([counted, weight, seed.to(weight.dtype)]))
        return loss * seed

    def _share(self) -> Tensor:
        """Sum the packed totals over all micro-batches and data-parallel ranks: one all-reduce over
        ("cp", "pp", "dp")."""
        packed = BatchTotals.nothing(self._device)
        if self._engine.owns_last:
            extras = any(
                isinstance(output, Mapping) and len(output) > 0 for output, _ in self._outputs[:1]
            )
            packed = BatchTotals.pack(
                self._sums, self._log.checksum(), extras=extras, device=self._device
            )
        BatchTotals.note_hooks(packed, sees=self.scale.sees, changes=self.scale.changes)
        all_reduce_flat(packed, self._mesh.group("cp", "pp", "dp"))
        if self._weights.sums:
            BatchTotals.weight_in(packed).fill_(1.0)
            BatchTotals.scaled_in(packed).copy_(self.scale.inverse)
        return packed

    def _read(self, packed: HostCopy, *, begins: bool = True, ends: bool = False) -> BatchTotals:
        """Read totals that `_share` has packed. Waits for them.

        Args:
            begins: whether they are those of the first batch of a step.
            ends: whether they are those of the last batch of a step.

        Raises:
            ConfigError: ranks logged different names, or hooks changed gradients of another size
                than on one process.
        """
        self.totals = (
            BatchTotals.unpack(packed.wait()) if self.known_totals is None else self.known_totals
        )
        self.totals.require_equal_keys()
        self.scale.check(self.totals, begins=begins, ends=ends)
        return self.totals


@dataclass(frozen=True)
class _UserStep:
    """The function that the engine calls for each micro-batch and stage.

    Attributes:
        like: micro-batches whose random numbers are drawn; None for those of `micro_batches`.
        first: the one of them whose random numbers the first of `micro_batches` draws.
    """

    runner: StepRunner
    hook: str
    micro_batches: MicroBatches
    rest: tuple[Any, ...]
    like: MicroBatches | None = None
    first: int = 0

    def enter(self, micro_batch: int) -> None:
        self.runner.seed(self.like or self.micro_batches, self.first + micro_batch)

    def __call__(self, micro_batch: int) -> Tensor | None:
        return self.runner.run_one(
            self.hook, self.micro_batches, micro_batch, self.rest, self.like, self.first
        )


def _no_context(*args: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        got = "None" if output is None else type(output).__name__
        raise ConfigError(
            "training_step must return the loss as a tensor, or a dict with the key 'loss'; got"
            f" {got}. A step cannot be skipped by returning None, because several ranks work on it."
        )
    if loss.numel() != 1:
        raise ConfigError(
            "training_step must return a loss that is a single number; got shape"
            f" {tuple(loss.shape)}. Average it, for example with loss.mean()."
        )
    return loss.reshape(())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
