"""Lightning3DStrategy: trains an unmodified LightningModule over tensor, pipeline and data-parallel ranks.

Every hook is a few lines that delegate: `assembly` builds this rank's part of the model, `step` runs the user's step over
micro-batches, `zero` owns gradients and optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from math import isfinite
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.checkpoint import CheckpointOptions, CheckpointStore, Names, name_groups
from lightning_3d.checkpoint.outcome import NotSaved
from lightning_3d.compat.lightning import find_last_at_urls, hush_tree_warning, run_after_closure, steps_after_this_batch
from lightning_3d.compat.lightning_data import batches_to_come, evaluation_place, keep_sample_order
from lightning_3d.compat.lightning_launch import connect_process_group, subprocess_launcher
from lightning_3d.compat.lightning_signals import obey_interrupt_alone, obey_signals_together
from lightning_3d.config.options.blocks import BlockOptions
from lightning_3d.config.options.experts import ExpertOptions
from lightning_3d.config.options.model import ModelOptions
from lightning_3d.config.options.nonfinite import STOP
from lightning_3d.config.options.precision import precision_of
from lightning_3d.config.options.self_check import check_mode
from lightning_3d.config.options.zero import ZeroOptions
from lightning_3d.errors import ConfigError, LayoutError, NonFiniteError
from lightning_3d.layout.batch_rules import few_micro_batches
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.resolve import resolve_available
from lightning_3d.layout.schedules import find_schedule
from lightning_3d.layout.sizes import check_number
from lightning_3d.parallel.blocks import Compilation
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline import PipelineEngine, runs_now
from lightning_3d.parallel.random_streams import global_seed
from lightning_3d.parallel.tensor import check_replicated_gradients
from lightning_3d.parallel.zero import DataParallelBackend, make_backend
from lightning_3d.ranks.process_ties import tie_workers
from lightning_3d.ranks.reporter import FailureReporter, show_refusals_plainly
from lightning_3d.strategy.assembly import assemble
from lightning_3d.strategy.checkpoint_hooks import TrainerCheckpoints
from lightning_3d.strategy.data_order import require_equal_orders, reset_unequal_generators, sampler_maker
from lightning_3d.strategy.float8 import multiply_in_float8, require_fp8
from lightning_3d.strategy.lightning_callbacks import defer_averaging, forget_deferred, set_up_callbacks
from lightning_3d.strategy.local_model import LocalModel, Partition, context_of
from lightning_3d.strategy.nonfinite import StepGuard, find_nonfinite, trained_weights
from lightning_3d.strategy.refusals import optimizers_of_a_stage, refuse_callbacks, refuse_unsupported, require_trained
from lightning_3d.strategy.self_check.check import SelfCheck
from lightning_3d.strategy.step import LossWeights, MicroBatches, StepResult, StepRunner, cut_batch, repeated_rows
from lightning_3d.strategy.step.checks import SameBatch, check_equal_batches, most_micro_batches
from lightning_3d.strategy.step.loss_weights import weigh_loss
from lightning_3d.strategy.step.micro_batches import SplitBatch
from lightning_3d.strategy.step.tracer import StepTracer
from lightning_3d.tracing.trace import OPTIMIZER
from lightning_3d.weights.initialize import initialize


class Lightning3DStrategy(TrainerCheckpoints):
    """Tensor x pipeline x data x context x expert parallelism with ZeRO, for `Trainer(strategy=Lightning3DStrategy("tp2_pp2_dp2"))`.

    The user's module stays as it is. Its model is a Transformers causal LM, or any module with a plan; its steps run once per
    micro-batch and stage.

    Args:
        layout: name such as "tp2_pp2_dp2" or a `Layout`; None is data parallelism over all ranks. `lightning_3d.planned` chooses one.
        micro_batch_size: rows of a micro-batch; None is the whole batch of a rank, cut only where the schedule needs more.
        schedule: a schedule of torch.distributed.pipelining without "Schedule", any case: "GPipe", "1F1B", "Interleaved1F1B",
            "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV". None: 1F1B, or Interleaved1F1B when vp > 1.
        vp: stages per pipeline rank; None takes the layout's, or what the schedule implies.
        zero_stage: 0 (our own gradient reduction and the plain optimizer), 1 (DeepSpeed shards the optimizer's state), 2 (gradients
            too) or 3 (parameters too).
        zero_reduce, zero_gather, zero_reduce_scatter, zero_offload: when and how gradients are reduced and parameters gathered, and
            what lies in host memory, see `ZeroOptions`.
        cp_kind: how context-parallel ranks attend to each other's tokens, "ring" or "ulysses", see `context_parallel`.
        recompute, recompute_every, recompute_keep, offload_activations, compile, sequence_parallel: of the model's blocks, see
            `BlockOptions`.
        fp8: linear layers of the model's blocks multiply in float8, see `fp8.py`; with Trainer(precision="bf16-true").
        moe_aux_loss, moe_z_loss, moe_bias_update, moe_capacity_factor: see `ExpertOptions`.
        checkpoint_verify, checkpoint_fall_back, checkpoint_asynchronous, checkpoint_timeout_seconds: how checkpoints are loaded and
            saved, see `CheckpointOptions`.
        checkpoint_check_space: refuse a fit before its first step when the checkpoints of its callbacks do not fit on the local disk.
        order: rank order, innermost axis first; None is ("tp", "cp", "pp", "dp").
        plan: parallel plan for a model that declares none: {"tp": {pattern: style}, "pp": {module: (inputs, outputs)}}.
        self_check: with tp, pp, cp or ep above 1 the model as rewritten is compared with itself whole, before its first forward. "auto":
            unless this combination of model, plan, layout and versions is known to be right; "always"; "never". See docs/your_model.md.
        pipeline_module: name of the submodule that is parallelized, where several have a plan.
        split_batch: function (batch, n) -> n micro-batches, for batches that cannot be cut along dimension 0.
        trace_every_n_steps: of steps whose number is a multiple of it `last_step.trace` tells what each rank did when, and what its
            memory held; None: only of those that `trace_next_step` asks for.
        nonfinite: what to do when the loss or the gradient norm of a step is not finite. "stop" raises `NonFiniteError` on all ranks before
            the optimizer steps, "skip" leaves the optimizer step out, "ignore" steps nevertheless.
        seed: of weights made from meta and of dropout; None takes the one of `seed_everything`, or 0.
        timeout: of collectives.

    Raises:
        LayoutError, PlanError, ConfigError, DataError: with one message that says what is wrong and what works.
    """

    def __init__(
        self,
        layout: str | Layout | None = None,
        *,
        micro_batch_size: int | None = None,
        schedule: str | None = None,
        vp: int | None = None,
        zero_stage: int = 0,
        zero_reduce: str | None = None,
        zero_gather: str | None = None,
        zero_reduce_scatter: bool | None = None,
        zero_offload: str = "none",
        cp_kind: str = "ring",
        recompute: str = "none",
        recompute_every: int = 1,
        recompute_keep: Sequence[str] | None = None,
        offload_activations: bool = False,
        compile: bool = False,
        sequence_parallel: bool | None = None,
        fp8: bool = False,
        moe_aux_loss: float | None = None,
        moe_z_loss: float = 0.0,
        moe_bias_update: float = 0.0,
        moe_capacity_factor: float | None = None,
        checkpoint_verify: bool = True,
        checkpoint_fall_back: bool = False,
        checkpoint_asynchronous: bool = True,
        checkpoint_timeout_seconds: float = 1800.0,
        checkpoint_check_space: bool = True,
        order: Sequence[str] | None = None,
        plan: dict[str, Any] | None = None,
        pipeline_module: str | None = None,
        self_check: str = "auto",
        split_batch: SplitBatch | None = None,
        trace_every_n_steps: int | None = None,
        nonfinite: str = STOP,
        seed: int | None = None,
        timeout: timedelta | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        show_refusals_plainly()
        hush_tree_warning()
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        if micro_batch_size is not None and micro_batch_size < 1:
            raise LayoutError(f"micro_batch_size is {micro_batch_size}; it must be at least 1.")
        self.layout, self.schedule = resolve_available(layout, schedule, vp, order)
        options = ZeroOptions(zero_stage, zero_reduce, zero_gather, zero_reduce_scatter, zero_offload)
        blocks = BlockOptions(recompute, recompute_every, recompute_keep, offload_activations, compile, sequence_parallel)
        experts = ExpertOptions(moe_aux_loss, moe_z_loss, moe_bias_update, moe_capacity_factor)
        self.options = ModelOptions(self.schedule, blocks, experts, cp_kind)
        self.options.require_suit(self.layout or Layout())
        self.zero = options.resolve(self.schedule, self.layout.pp if self.layout is not None else 1)
        self.fp8 = fp8
        self.micro_batch_size = micro_batch_size
        self.last_step: StepResult | None = None
        self._tracer = StepTracer(trace_every_n_steps)
        self.guard = StepGuard(nonfinite)
        self.model_parts: LocalModel | None = None
        self.mesh: Mesh | None = None
        self._plan = plan
        self._pipeline_module = pipeline_module
        self._self_check = check_mode(self_check)
        self._split_batch = split_batch
        self._seed = seed
        self._timeout = timeout or timedelta(minutes=30)
        self._num_nodes = 1
        self._backend: DataParallelBackend | None = None
        self._runner: StepRunner | None = None
        self._same_batch: SameBatch | None = None
        self._failures: FailureReporter | None = None
        self._group_names: Names = []
        check_number("checkpoint_timeout_seconds", checkpoint_timeout_seconds, least=1)
        self._store = CheckpointStore(
            CheckpointOptions(checkpoint_verify, checkpoint_fall_back, checkpoint_asynchronous, checkpoint_timeout_seconds)
        )
        self._check_space = checkpoint_check_space
        find_last_at_urls()
        self.compilation: Compilation | None = None
        self._advised = self._told = False
        self._failed = self._terminated = False
        self._batches_of_step = 0

    @property
    def zero_stage(self) -> int:
        """What is sharded over the data-parallel ranks, see `ZeroOptions`."""
        return self.zero.stage

    # Ranks and processes

    @property
    def is_distributed(self) -> bool:
        """Lightning asks for this attribute by name: without it neither samplers nor `sync_dist` know of several ranks."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different data."""
        return self.layout.dp if self.layout is not None else self.num_nodes * self.num_processes

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that share a data coordinate see the same batch."""
        mesh = self._require_mesh()
        return {"num_replicas": mesh.size("dp"), "rank": mesh.index("dp")}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Its workers end with this rank, however it ends."""
        tie_workers(dataloader)
        return dataloader

    @property
    def specs(self) -> dict[str, Any]:
        """Where every parameter of this rank lies in the whole model: `ShardSpec` by full parameter name."""
        assert self.model_parts is not None, "the model is built in setup"
        return self.model_parts.specs

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        precision_of(str(self.precision_plugin.precision), fp8=self.fp8)
        if self.fp8:
            require_fp8(self.root_device)
        world_size = self.num_nodes * self.num_processes
        if self.layout is None:
            self.layout = Layout(dp=world_size)
        self.layout.require_world_size(world_size)
        self._launcher = subprocess_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.layout is not None
        self._failed, self._terminated, self._batches_of_step = False, False, 0
        self.guard.begin()
        reset_unequal_generators(connect_process_group(self, self._timeout), self.root_device)
        if self.lightning_module is not None:
            (obey_signals_together if self.world_size > 1 else obey_interrupt_alone)(self.lightning_module.trainer)
        if self._failures is None:
            self._failures = FailureReporter.connect(self.global_rank, self.world_size)
            children = getattr(self._launcher, "children", None)
            if children is not None:
                children.reporter = self._failures
            self._failures.watch()
        if self.mesh is None:
            earlier = Partition.of(self.lightning_module) if self.lightning_module is not None else None
            if earlier is not None and earlier.suits(self.layout, self.schedule):
                self.mesh = earlier.mesh  # its layers use these groups
            else:
                self.mesh = Mesh(self.layout, timeout=self._timeout)
                self.mesh.warm_up()
        if self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            refuse_callbacks(self.lightning_module.trainer, self.zero_stage)
            defer_averaging(self.lightning_module.trainer)

    _shape_only = False
    """Whether tensors have no values, see `dryrun`."""

    _materialize = staticmethod(initialize)
    """Gives parameters their values."""

    def _require_mesh(self) -> Mesh:
        assert self.mesh is not None, "the process groups are created in setup_environment"
        return self.mesh

    # Building

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """`configure_model` builds on meta: no rank ever holds the whole model in memory."""
        with torch.device("meta"):
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            refuse_unsupported(trainer)
        keep_sample_order(trainer, sampler_maker(self.root_device, lambda: next(self._resumed_orders, None)))
        self._build()
        if fitting:
            self.setup_optimizers(trainer)
            self._hold_checkpoint_folders(trainer)
        self.setup_precision_plugin()
        set_up_callbacks(trainer, self._require_mesh().layout)

    def _build(self) -> None:
        """Partition, rewrite and materialize the model, once per module."""
        module = self.lightning_module
        assert module is not None
        Partition.require_kept(module)
        earlier = Partition.of(module)
        if earlier is not None and earlier.parts is self.model_parts:
            self.model_to_device()
            return
        self.model = self.precision_plugin.convert_module(module)
        if earlier is not None:
            self.model_parts = earlier.hand_over(self._require_mesh().layout, self.options)
        else:
            check = SelfCheck("never" if self._shape_only else self._self_check, self._require_mesh(), self.options, self.root_device)
            self.model_parts = assemble(
                module,
                self._require_mesh(),
                self.options,
                seed=self._seed if self._seed is not None else global_seed(),
                device=self.root_device,
                weights_device=torch.device("cpu") if self.zero.stage == 3 else None,
                materialize=self._materialize,
                user_plan=self._plan,
                pipeline_module=self._pipeline_module,
                inspect=check.inspect,
            )
            check.attach(self.model_parts.module)
        if self.options.blocks.compile:
            self.compilation = Compilation(self.root_device, self.schedule, len(self.model_parts.blocks))
        multiply_in_float8(self.model_parts.blocks, on=self.fp8)
        self._connect(self.model_parts, self._require_mesh())
        self.model_to_device()

    def _connect(self, parts: LocalModel, mesh: Mesh) -> None:
        """Put backend, engine and step runner around the local model."""
        module = self.lightning_module
        assert module is not None
        precision = precision_of(str(self.precision_plugin.precision))
        stages = list(parts.parameters.values())
        self._backend = make_backend(self.zero, mesh, parts.specs, stages=stages, precision=precision, shape_only=self._shape_only)
        weights = LossWeights()
        weigh_loss(module, weights, context_of(mesh, self.options.cp_kind) if mesh.size("cp") > 1 else None)
        engine = PipelineEngine(
            mesh,
            parts.assignment,
            parts.parameters,
            schedule=self.schedule,
            vp=mesh.layout.vp,
            state=parts.state,
            device=self.root_device,
            after_backward=self._backend.after_backward,
            recorder=self._tracer.connect(
                module, self.root_device, mesh.layout, self.schedule, hooks=not self.options.blocks.compile
            ),
        )
        check = None
        if mesh.size("tp") > 1:
            gradient_of = self._backend.local_gradient
            check = partial(check_replicated_gradients, parts.module, parts.module_specs, mesh.group("tp"), gradient_of)
        self.engine = engine
        self._runner = StepRunner(
            module,
            engine,
            mesh,
            weights,
            parts.state.random,
            self.root_device,
            context=self._step_context,
            after_first_backward=check,
            routers=parts.routers,
            tracer=self._tracer,
        )
        self._same_batch = SameBatch(mesh, self.root_device)

    def _step_context(self, hook: str) -> AbstractContextManager[Any]:
        names = {"training": "train_step_context", "validation": "val_step_context", "test": "test_step_context"}
        return getattr(self.precision_plugin, names.get(hook, "predict_step_context"))()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with optimizers_of_a_stage(self._require_mesh().index("pp")):
            super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None and self._backend is not None
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers; Lightning3DStrategy drives exactly one. Use"
                " parameter groups of one optimizer instead."
            )
        require_trained(self.optimizers[0], self.root_device)
        self._group_names = name_groups(module, self.optimizers[0])
        self.optimizers = [self._backend.prepare(module, self.optimizers[0])]
        # Gradients are made inside training_step, after this strategy zeroed them; Lightning would wipe them between it and the step.
        module.optimizer_zero_grad = _keep_gradients  # type: ignore[method-assign]
        self.precision_plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None and self._backend is not None and self.model_parts is not None
        self._backend.shard(self.lightning_module, self.model_parts.blocks, self.root_device, runs_now)
        self.lightning_module.to(self.root_device)

    # Steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of all micro-batches, and the reduction of gradients before an optimizer step."""
        batch, *rest = (*args, *kwargs.values())
        assert self._runner is not None and self._backend is not None and self.lightning_module is not None
        trainer = self.lightning_module.trainer
        micro_batches = self._micro_batches(batch, trainer.train_dataloader, trainer.fit_loop.batch_idx, training=True)
        self._advise(len(micro_batches) - micro_batches.fillers)
        place, ends = self._batches_of_step, steps_after_this_batch(trainer)
        self._batches_of_step = 0 if ends else place + 1
        step = trainer.global_step
        with self._tracer.batch(step + 1, place):
            self.last_step, outputs = self._runner.train(micro_batches, tuple(rest), self._backend, step, place=place, ends=ends)
            if ends:
                with self._tracer.recorder.span(OPTIMIZER):
                    self.last_step.grad_norm = self._backend.grad_norm()
        self._judge(self.last_step, begins=place == 0)
        if ends and self.compilation is not None and not self._told:
            self._told = True
            self.compilation.warn()
        return outputs

    def _judge(self, step: StepResult, *, begins: bool) -> None:
        """Before the optimizer changes anything: stop, or mark the step to be skipped, where loss or norm is not finite."""
        assert self._runner is not None and self._backend is not None and self.layout is not None and self.lightning_module is not None
        if self._shape_only:
            return
        if begins:
            self.guard.begin_step()
        finite = isfinite(step.loss)
        self.guard.note(step.loss, step.weight, lost_here=not finite and not self._runner.has_finite_loss())
        if step.grad_norm is None or self.guard.accepts(step.grad_norm):
            return
        gradients, weights = self._backend.reduced_gradients(), trained_weights(self.lightning_module, self._backend)
        found = find_nonfinite(self.guard, gradients, weights, self.layout, self.global_rank, self.root_device)
        number, lr = self.lightning_module.trainer.global_step + 1, float(self.optimizers[0].param_groups[0]["lr"])
        warning = self.guard.refuse(number, step.grad_norm, found, self.layout, lr, str(self.precision_plugin.precision))
        rank_zero_warn(warning)
        step.skipped = True

    def trace_next_step(self) -> None:
        """Trace the next optimizer step, whatever `trace_every_n_steps` is. All ranks call it, as a callback's hook does."""
        self._tracer.trace_next_step()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict", args, kwargs)

    def _evaluate(self, hook: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch, *rest = (*args, *kwargs.values())
        assert self._runner is not None and self._backend is not None and self.lightning_module is not None
        trainer = self.lightning_module.trainer
        loader, index = evaluation_place(trainer) if hook != "predict" else (None, 0)
        micro_batches = self._micro_batches(batch, loader, index, training=False)
        with self._backend.parameters_in_use():
            return self._runner.evaluate(hook, micro_batches, tuple(rest))

    def _micro_batches(self, batch: Any, loader: object, index: int, *, training: bool) -> MicroBatches:
        assert self.layout is not None and self._same_batch is not None and self.lightning_module is not None
        trainer = self.lightning_module.trainer
        together = self._runs_together(training)
        to_come = None if trainer.predicting and self.zero.stage < 3 and self.layout.ep == 1 else batches_to_come(trainer)
        if to_come is not None and self.data_parallel_size > 1:
            check_equal_batches(to_come, self._require_mesh(), self.root_device)
        if to_come is not None and not trainer.predicting:
            require_equal_orders(loader, self.root_device)
        self._same_batch.check(batch)
        return cut_batch(
            batch,
            self.micro_batch_size,
            repeated=partial(repeated_rows, loader, index),
            agree=partial(most_micro_batches, mesh=self._require_mesh(), device=self.root_device) if together else None,
            schedule=find_schedule(self.schedule) if training else None,
            pp=self.layout.pp,
            vp=self.layout.vp,
            split_batch=self._split_batch,
        )

    def _runs_together(self, training: bool) -> bool:
        """Whether data-parallel ranks must run as many micro-batches."""
        assert self.layout is not None
        return self.layout.ep > 1 or self.zero.gathers_every_micro_batch or (training and self.zero.reduces_every_micro_batch)

    def _advise(self, micro_batches: int) -> None:
        """Once: warn when the pipeline is predicted to idle for want of micro-batches."""
        if self._advised or self.layout is None:
            return
        self._advised = True
        advice = few_micro_batches(self.layout, self.schedule, micro_batches)
        if advice is not None:
            rank_zero_warn(f"{advice} Use a larger batch_size or a smaller micro_batch_size.")

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The backward already ran inside `training_step`; this calls the hooks around it."""
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: pl.LightningModule | Module | None = None, **kwargs: Any
    ) -> Any:
        assert self._backend is not None and self.lightning_module is not None and self.model_parts is not None
        result = closure()
        if self.last_step is not None and self.last_step.skipped:
            self._backend.discard()
            self.model_parts.after_skipped_step()
        else:
            run_after_closure(self.precision_plugin, self.lightning_module, optimizer)
            with self._tracer.optimizer():
                self._backend.step()
                self.model_parts.after_optimizer_step()
        if self.last_step is not None:
            self.last_step.trace = self._tracer.finish(self._backend)
        return result

    def _clip_gradients(
        self, optimizer: Optimizer, clip_val: float | None = 0.0, gradient_clip_algorithm: str | None = "norm"
    ) -> None:
        """Clip by the true global norm, or by value."""
        assert self._backend is not None
        by_value = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value"
        if clip_val and clip_val > 0:
            with self._tracer.optimizer():
                self._backend.clip(**{"value" if by_value else "max_norm": float(clip_val)})

    # Failures

    def _has_failed_alone(self) -> bool:
        """Whether a callback communicates because of an exception (to save a checkpoint), which other ranks know nothing of.

        They cannot take part. Lightning tells callbacks before it tells the strategy, so the failure is posted here. All ranks see
        SIGTERM, and a step that is not finite, together.
        """
        error = sys.exception()
        if error is None or isinstance(error, (*_TOGETHER, NotSaved)) or self.world_size == 1 or self.lightning_module is None:
            return False
        if self.lightning_module.trainer.state.status != TrainerStatus.INTERRUPTED:
            return False
        self.on_exception(error)
        return True

    def _may_communicate(self, what: str) -> bool:
        if self._runner is not None:
            self._runner.refuse_inside(what)
        return dist.is_initialized() and not self._has_failed_alone()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks before any connection is torn down, so that the cause is shown once and nobody waits. SIGTERM, and a step
        that is not finite, end all ranks together: a save that is under way is finished first."""
        together = isinstance(exception, _TOGETHER)
        if together:
            self._store.finish()
        self._failed, self._terminated = not isinstance(exception, NotSaved), together
        self._tell_end(exception)
        if self._failures is not None:
            self._failures.note(exception)

    @override
    def teardown(self) -> None:
        if self._failures is not None:
            self._failures.close()
            self._failures = None
        if self._backend is not None:
            if not self._failed:
                self._backend.make_whole()
            elif self.model_parts is not None:
                self.model_parts.lost = self._backend.abandon()
            self._backend.teardown()
        self._store.close(failed=self._failed and not self._terminated)
        module = self.lightning_module
        if module is not None:
            forget_deferred(module.trainer)
        if module is not None and "optimizer_zero_grad" in module.__dict__:
            del module.optimizer_zero_grad
        if module is not None and any(parameter.is_meta for parameter in module.parameters()):
            return  # refused half built: moving it to the CPU would fail and hide the refusal
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("lightning_3d", cls, description=(cls.__doc__ or "").splitlines()[0])


_TOGETHER = (SIGTERMException, NonFiniteError)
"""What all ranks raise at the same place, so that they can still communicate."""


def _keep_gradients(*args: Any, **kwargs: Any) -> None:
    """In the place of `LightningModule.optimizer_zero_grad` during a fit."""


if "lightning_3d" not in StrategyRegistry.available_strategies():
    Lightning3DStrategy.register_strategies(StrategyRegistry)
