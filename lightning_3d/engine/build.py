"""Builds this rank's part of the user's model, and puts backend, engine and step runner around
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_3d.engine.assembly import assemble
from lightning_3d.engine.built_model import BuiltModel
from lightning_3d.engine.float8 import multiply_in_float8
from lightning_3d.engine.local_model import LocalModel, Partition, context_of
from lightning_3d.engine.loop import Loop
from lightning_3d.engine.nonfinite import StepGuard
from lightning_3d.engine.partial_values import PartialValues
from lightning_3d.engine.plan_draft.auto import choose_plan, with_draft
from lightning_3d.engine.self_check.check import SelfCheck, place_of
from lightning_3d.engine.self_check.frozen import FrozenChecks
from lightning_3d.engine.self_check.local_sizes import apply_local_sizes
from lightning_3d.engine.skipped_blocks import refuse_skipped_blocks
from lightning_3d.engine.step import LossWeights, StepRunner
from lightning_3d.engine.step.known_values import KnownValues
from lightning_3d.engine.step.looks import epsilon_of
from lightning_3d.engine.step.loss_proof import LossProof
from lightning_3d.engine.step.loss_weights import weigh_loss
from lightning_3d.engine.step.outside_reads import OutsideReads
from lightning_3d.engine.step.splitter import BatchSplitter
from lightning_3d.engine.step.tracer import StepTracer
from lightning_3d.errors import NoPlanError
from lightning_3d.layout.micro_batch_rows import MicroBatchRows
from lightning_3d.options.loss import ACCUMULATE
from lightning_3d.options.model import ModelOptions
from lightning_3d.options.precision import precision_of
from lightning_3d.options.script import SplitBatch
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.blocks import Compilation
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline import PipelineEngine
from lightning_3d.parallel.random_streams import global_seed
from lightning_3d.parallel.tensor import check_replicated_gradients
from lightning_3d.parallel.undone import isolated_generators
from lightning_3d.parallel.zero import DataParallelBackend, make_backend


@dataclass(frozen=True)
class ModelSources:
    """The sources of a model's plan and values, and the check of both.

    Attributes:
        plan: the user's parallel plan, for a model that declares none; "auto" drafts one.
        pipeline_module: name of the submodule that is parallelized; None where one has a plan.
        self_check: "auto", "always" or "never".
        seed: of weights made from meta and of dropout; None takes the one of `seed_everything`, or
            0.
    """

    plan: dict[str, Any] | str | None = None
    pipeline_module: str | None = None
    self_check: str = "auto"
    seed: int | None = None


@dataclass(frozen=True)
class BuildOptions:
    """The user's options for a model and its training.

    Attributes:
        fp8: whether linear layers of blocks multiply in float8.
        micro_batch_size: rows of a micro-batch; None takes the largest that gives the schedule
            enough of them.
        split_batch: the user's own function, for batches that cannot be split along dimension 0.
        rows: how the rows of a global batch are dealt to ranks.
    """

    model: ModelOptions
    zero: ZeroOptions
    sources: ModelSources
    fp8: bool = False
    micro_batch_size: int | None = None
    split_batch: SplitBatch | None = None
    rows: MicroBatchRows | None = None


@dataclass(frozen=True)
class Surroundings:
    """What exists before the model of an engine is built.

    Attributes:
        precision: name of the precision.
        context: function that makes a context for one call of the user's step, by "training",
            "validation", "test" or "predict".
        loop: the loop around the engine.
        materialize: function that gives parameters on meta values, as `initialize` does.
        shape_only: whether tensors have no values (a dry run), so that checks of values are left
            out.
        equal_copies: see `make_backend`.
        reads: the class that sees parameters which the user's code reads outside of the model.
    """

    precision: str
    context: Callable[[str], AbstractContextManager[Any]]
    loop: Loop
    tracer: StepTracer
    guard: StepGuard
    materialize: Callable[..., None]
    shape_only: bool = False
    equal_copies: bool = False
    reads: type[OutsideReads] = OutsideReads


def build(
    module: nn.Module, mesh: Mesh, device: torch.device, options: BuildOptions, around: Surroundings
) -> BuiltModel:
    """Turn the user's module into this rank's part of it, in place, and put backend, engine and
    step runner around it.

    A module that an earlier Trainer partitioned for the same layout keeps its parts.

    Raises:
        PlanError, LayoutError, ConfigError, CheckpointError: see `assemble` and
            `Partition.hand_over`.
    """
    earlier = Partition.of(module)
    # the order of samples is drawn from the generators as they are on one process
    with isolated_generators():
        parts = (
            _assemble(module, mesh, device, options, around)
            if earlier is None
            else earlier.hand_over(mesh.layout, options.model)
        )
    model, precision = options.model, precision_of(around.precision)
    sends_tokens = mesh.layout.ep > 1
    compilation = (
        Compilation(device, model.schedule, len(parts.blocks), in_order=sends_tokens)
        if model.blocks.compile
        else None
    )
    multiply_in_float8(parts.blocks, on=options.fp8)
    # The backend before the engine, which calls it after each backward.
    stages = list(parts.parameters.values())
    how = {"shape_only": around.shape_only, "equal_copies": around.equal_copies}
    backend = make_backend(
        options.zero, mesh, parts.specs, stages=stages, precision=precision, **how
    )
    # Hooks that measure memory inside a block would break the graph of a compiled one.
    recorder = around.tracer.connect(
        module, device, mesh.layout, model.schedule, operations=not model.blocks.compile
    )
    engine = PipelineEngine(
        mesh,
        parts.assignment,
        parts.parameters,
        schedule=model.schedule,
        vp=mesh.layout.vp,
        state=parts.state,
        device=device,
        after_backward=backend.after_backward,
        before_last_backward=backend.before_last_backward,
        recorder=recorder,
    )
    reads = around.reads(module, parts, mesh, zero_stage=options.zero.stage)
    known = KnownValues(device, wanted=device.type != "cpu" and not around.shape_only)
    runner = _make_runner(
        module, parts, mesh, device, options, around, engine, backend, known, reads
    )
    splitter = BatchSplitter(
        mesh, device, model.schedule, options.zero, options.micro_batch_size, options.split_batch
    )
    guard = None if around.shape_only else around.guard
    proof = LossProof(
        module,
        runner,
        backend,
        mesh,
        device,
        split_batch=options.split_batch,
        wanted=proves_loss(options, around),
        records=compilation is None,
        epsilon=epsilon_of(precision, fp8=options.fp8),
        keeps_parameters=options.zero.stage < 3,
        splits=not around.shape_only,
        accumulates=options.model.loss.loss_reduction == ACCUMULATE,
        quietly=around.loop.quietly,
    )
    return BuiltModel(
        module,
        parts,
        mesh,
        device,
        model.schedule,
        around.loop,
        around.precision,
        backend,
        engine,
        runner,
        splitter,
        known,
        reads,
        around.tracer,
        guard,
        proof,
        compilation,
    )


def proves_loss(options: BuildOptions, around: Surroundings) -> bool:
    """Return whether the first step compares the loss of a micro-batch with those of its parts. The
    capacity of experts depends on all tokens of a micro-batch, so that parts of it may keep other
    tokens."""
    declared = (
        options.model.loss.loss_reduction is not None or options.sources.self_check == "never"
    )
    return not (
        declared or around.shape_only or options.model.experts.moe_capacity_factor is not None
    )


def _assemble(
    module: nn.Module, mesh: Mesh, device: torch.device, options: BuildOptions, around: Surroundings
) -> LocalModel:
    """Assemble the parts of a whole module, and arrange for its self-check.

    Raises:
        ConfigError: the module skips blocks at random.
    """
    refuse_skipped_blocks(module, mesh.layout, options.zero.stage)
    sources, alone = options.sources, around.shape_only
    checked = alone or sources.self_check != "never"
    chosen = choose_plan(
        module, mesh, sources.plan, sources.pipeline_module, alone=alone, checked=checked
    )
    check = SelfCheck(
        "never" if alone else sources.self_check,
        mesh,
        options.model,
        device,
        required=chosen.drafted,
    )
    frozen = FrozenChecks(
        "never" if alone else sources.self_check,
        mesh,
        options.model.cp_kind,
        device,
        drafted=chosen.drafted,
    )
    try:
        parts = assemble(
            module,
            mesh,
            options.model,
            seed=sources.seed if sources.seed is not None else global_seed(),
            device=device,
            # where ZeRO-3 shards them, before they go to `device`
            weights_device=torch.device("cpu") if options.zero.stage == 3 else None,
            materialize=around.materialize,
            user_plan=chosen.plan,
            pipeline_module=chosen.name,
            inspect=check.inspect,
            inspect_frozen=frozen.inspect,
        )
    except NoPlanError as error:
        raise with_draft(error, module, mesh, chosen.name, alone=alone) from None
    if alone:  # no self-check, which finds these sizes with the other ranks
        apply_local_sizes(parts.module, chosen.local_sizes, place_of(mesh))
    check.attach(parts.module, PartialValues(parts, mesh.layout).add)
    frozen.attach()
    return parts


def _make_runner(
    module: nn.Module,
    parts: LocalModel,
    mesh: Mesh,
    device: torch.device,
    options: BuildOptions,
    around: Surroundings,
    engine: PipelineEngine,
    backend: DataParallelBackend,
    known: KnownValues,
    reads: OutsideReads,
) -> StepRunner:
    weights = LossWeights(options.model.loss)
    weigh_loss(
        module, weights, context_of(mesh, options.model.cp_kind) if mesh.size("cp") > 1 else None
    )
    check = None
    if mesh.size("tp") > 1:
        check = partial(
            check_replicated_gradients,
            parts.module,
            parts.module_specs,
            mesh.group("tp"),
            backend.local_gradient,
        )
    return StepRunner(
        module,
        engine,
        mesh,
        weights,
        parts.state.random,
        device,
        context=partial(_step_context, around.context, known),
        after_first_backward=check,
        routers=parts.routers,
        tracer=around.tracer,
        rows=options.rows,
        reads=reads,
        looks_at_attributes=proves_loss(options, around),
    )


@contextmanager
def _step_context(
    context: Callable[[str], AbstractContextManager[Any]], known: KnownValues, hook: str
) -> Iterator[None]:
    """A context for one call of the user's step: that of its precision, and in training that of the
    values that the host knows."""
    with context(hook), known.following() if hook == "training" else nullcontext():
        yield
