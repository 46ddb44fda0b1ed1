"""Lightning3DStrategy: trains an unmodified LightningModule over tensor, pipeline and data-parallel
ranks.

Every hook is a few lines that delegate. When `setup` begins, `build` makes a `BuiltModel`. An
`OptimizerStep` runs the user's step with it over micro-batches, and then the optimizer.
`rank_hooks` and `checkpoint_hooks` have the hooks about ranks and checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.checkpoint import CheckpointStore, name_groups
from lightning_3d.compat.flight_recorder import record_collectives
from lightning_3d.compat.lightning import (
    around_hooks,
    find_last_at_urls,
    hush_tree_warning,
)
from lightning_3d.compat.lightning_data import keep_sample_order
from lightning_3d.compat.lightning_fetchers import join_fetchers
from lightning_3d.compat.lightning_launch import connect_process_group, subprocess_launcher
from lightning_3d.compat.lightning_signals import obey_interrupt_alone, obey_signals_together
from lightning_3d.engine.build import BuildOptions, ModelSources, Surroundings, build
from lightning_3d.engine.data_order import reset_unequal_generators, sampler_maker
from lightning_3d.engine.float8 import require_fp8
from lightning_3d.engine.local_model import LocalModel, Partition
from lightning_3d.engine.nonfinite import StepGuard
from lightning_3d.engine.not_ready import ATTACHED, BUILT, require
from lightning_3d.engine.replica_check import ReplicaCheck
from lightning_3d.engine.step import StepResult
from lightning_3d.engine.step.tracer import StepTracer
from lightning_3d.health.held_memory import wait_for_memory
from lightning_3d.health.loss_spikes import LossSpikes
from lightning_3d.layout.elastic import whole_dp
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.resolve import resolve_available
from lightning_3d.options.checkpoints import CheckpointOptions
from lightning_3d.options.model import ModelOptions
from lightning_3d.options.precision import precision_of
from lightning_3d.options.reliability import IGNORE, Reliability
from lightning_3d.options.schema import accept
from lightning_3d.options.zero import NONE, ZeroOptions
from lightning_3d.parallel.blocks import Compilation
from lightning_3d.parallel.pipeline import PipelineEngine
from lightning_3d.parallel.random_streams import global_seed
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.ranks.heartbeat import BETWEEN, EVALUATING, STEP, Heartbeat
from lightning_3d.ranks.loopback import GlooInterface
from lightning_3d.ranks.reporter import show_refusals_plainly
from lightning_3d.strategy.arguments import StrategyOptions
from lightning_3d.strategy.checkpoint_hooks import CheckpointHooks
from lightning_3d.strategy.cpu_threads import agree_on_cpu_threads
from lightning_3d.strategy.endings import Ending
from lightning_3d.strategy.exponential_average import average_of
from lightning_3d.strategy.first_step import FirstStep
from lightning_3d.strategy.hook_reads import HookReads
from lightning_3d.strategy.lightning_callbacks import (
    defer_averaging,
    forget_deferred,
    set_up_callbacks,
)
from lightning_3d.strategy.model_summary import show_whole_model
from lightning_3d.strategy.out_of_memory import explain
from lightning_3d.strategy.pace import Pace
from lightning_3d.strategy.refusals import (
    check_optimizers,
    optimizers_of_a_stage,
    refuse_callbacks,
    refuse_surroundings,
    refuse_unsupported,
)
from lightning_3d.strategy.role_arguments import suit_role
from lightning_3d.strategy.streams import end_together
from lightning_3d.strategy.surviving_loggers import survive_loggers
from lightning_3d.strategy.trainer_loop import TrainerLoop, step_context
from lightning_3d.strategy.trainer_steps import TrainerSteps
from lightning_3d.weights.initialize import initialize


class Lightning3DStrategy(CheckpointHooks):
    """Tensor x pipeline x data x context x expert parallelism with ZeRO, for
    `Trainer(strategy=Lightning3DStrategy("tp2_pp2_dp2"))`.

    The user's module needs no change. Its model is a Transformers causal LM, or any module with a
    parallel plan; its steps run once per micro-batch and stage.

    Its arguments are the options of `StrategyOptions`; `help(Lightning3DStrategy.__init__)` lists
    them.

    Raises:
        LayoutError, PlanError, ConfigError, DataError: the message says what is wrong and what
            works.
    """

    @accept(StrategyOptions, first=show_refusals_plainly)
    def __init__(self, options: StrategyOptions) -> None:
        options = suit_role(options)
        hush_tree_warning()
        find_last_at_urls(Lightning3DStrategy)
        super().__init__(*options.of_lightning)
        self.layout, self.schedule = resolve_available(
            options.layout, options.schedule, options.vp, options.order
        )
        self.options = ModelOptions.read(options, self.schedule)
        self.options.require_suit(self.layout or Layout())
        zero = ZeroOptions.of(options).resolve(
            self.schedule, self.layout.pp if self.layout is not None else 1
        )
        self.zero = zero.over(self.layout) if self.layout is not None else zero
        self.fp8, self.micro_batch_size, self._split_batch = (
            options.fp8,
            options.micro_batch_size,
            options.split_batch,
        )
        self._whole_dp = whole_dp(options.elastic, self.layout, options.micro_batch_size)
        self._last_step: StepResult | None = None
        self.reliability = Reliability.of(options.reliability)
        self.heartbeat = Heartbeat()
        self._first_step = FirstStep()
        self._interface = GlooInterface()
        self._tracer = StepTracer(options.trace_every_n_steps, self.heartbeat)
        watched = self.reliability
        spikes = LossSpikes(watched.loss_spike_score) if watched.loss_spikes != IGNORE else None
        self.guard = StepGuard(
            options.nonfinite, watched.nonfinite_in_a_row, spikes, watched.loss_spikes
        )
        self._sources = ModelSources(
            options.plan, options.pipeline_module, options.self_check, options.seed
        )
        self._store_options = CheckpointOptions.of(options)
        self._store = CheckpointStore(self._store_options)
        self._check_space = options.checkpoint_check_space
        self._timeout = options.timeout or timedelta(minutes=30)

    _shape_only = False
    """True where tensors have no values (a dry run)."""

    _pace: Pace | None = None
    _made_steps: TrainerSteps | None = None

    _materialize = staticmethod(initialize)
    """Gives parameters their values."""

    # The model

    @property
    def zero_stage(self) -> int:
        """ZeRO stage: 1 shards the optimizer's state over data-parallel ranks, 2 gradients too, 3
        parameters too; 0 nothing."""
        return self.zero.stage

    @property
    def seed(self) -> int:
        """Seed of weights initialized from the meta device and of dropout."""
        return self._sources.seed if self._sources.seed is not None else global_seed()

    @property
    def optimizer_device(self) -> torch.device:
        """Device on which the optimizer steps: this rank's, or the CPU with `zero_offload`."""
        return torch.device("cpu") if self.zero.offload != NONE else self.root_device

    @property
    def _on_accelerator(self) -> bool:
        """Whether kernels may add in another order each time, as those of GPUs do."""
        return self.root_device.type != "cpu"

    @property
    def last_step(self) -> StepResult | None:
        """The numbers of the latest batch or optimizer step, the same on every rank; None before
        the first. Whoever reads one of them while the step runs waits for the device."""
        return self._last_step

    @property
    def specs(self) -> dict[str, ShardSpec]:
        """Place of every parameter of this rank in the whole model, by full parameter name."""
        return self.built.parts.specs

    @property
    def model_parts(self) -> LocalModel | None:
        """This rank's part of the model; None before it is built."""
        return self._built.parts if self._built is not None else None

    @property
    def engine(self) -> PipelineEngine:
        """The pipeline schedule of this rank."""
        return self.built.engine

    @property
    def compilation(self) -> Compilation | None:
        """Compilation of the blocks; None without `compile`, or before the model is built."""
        return self._built.compilation if self._built is not None else None

    @property
    def parameter_counts(self) -> tuple[int, int]:
        """Parameters of the whole model, and those that this rank keeps. A tied parameter counts
        once."""
        return self.built.parts.size.count(), sum(self.built.share.values())

    # Ranks and processes

    @override
    def _configure_launcher(self) -> None:
        refuse_surroundings(os.environ)
        # refuses what is unknown, before any rank starts
        precision_of(str(self.precision_plugin.precision), fp8=self.fp8)
        if self.fp8:
            require_fp8(self.root_device)
        self._settle_layout()
        environment = require(self.cluster_environment, "a cluster environment", ATTACHED)
        self._launcher = subprocess_launcher(environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._ending = Ending.NORMAL
        self.guard.begin()
        if self._built is None:
            wait_for_memory(self.root_device, self.reliability.held_memory_timeout)
        record_collectives()
        join_seconds = self.reliability.rendezvous_timeout
        reset_unequal_generators(
            connect_process_group(self, self._timeout, join_seconds, self._interface),
            self.root_device,
        )
        agree_on_cpu_threads(self.root_device)
        trainer = self.user_module.trainer if self.lightning_module is not None else None
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        self._first_step.begin(fitting=fitting)
        if trainer is not None:
            (obey_signals_together if self.world_size > 1 else obey_interrupt_alone)(trainer)
            survive_loggers(trainer.loggers)
        self._watch_ranks()
        self._connect_mesh(self._timeout)
        if trainer is not None:
            self._watch_progress(
                trainer.default_root_dir, self._store_options.checkpoint_timeout_seconds
            )
        if trainer is not None and fitting:
            # Before Lightning calls `setup` of callbacks, where those that average copy the module:
            # it is still whole.
            refuse_callbacks(trainer, self.zero_stage)
            defer_averaging(trainer)

    # Building

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Run `configure_model` on the meta device, so that no rank ever holds the whole model in
        memory."""
        with torch.device("meta"):
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        require(self.accelerator, "an accelerator", ATTACHED).setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            refuse_unsupported(trainer)
        keep_sample_order(
            trainer,
            sampler_maker(
                self.root_device, lambda: next(self._resumed_orders, None), self.micro_batch_rows
            ),
        )
        predicts = self.zero.stage == 3 or self.mesh.layout.ep > 1
        join_fetchers(
            trainer, end_together(self.mesh, predicts=predicts) if self.world_size > 1 else None
        )
        self._build()
        self._steps.begin_fit()
        around_hooks(self._steps.around_hook)
        if self._pace is not None:  # of a fit that raised before its end
            self._pace.close()
        self._pace = self._make_pace()
        self._replicas = ReplicaCheck(
            self.reliability.check_replicas_every_n_steps,
            self.root_device,
            lambda: self._steps.hooks.names,
        )
        self.built.twice.begin_fit(self.reliability.rerun_every_n_steps)
        if fitting:
            self.setup_optimizers(trainer)
            if (average := average_of(trainer)) is not None:
                self.built.backend.keep_average(self.user_module, average.decay)
            self._hold_checkpoint_folders(trainer)
        self.setup_precision_plugin()
        # Last: averaging callbacks copy the module as it is now.
        set_up_callbacks(trainer, self.mesh.layout)
        show_whole_model(trainer)

    def _build(self) -> None:
        """Partition, rewrite and materialize the model, once per module."""
        module = self.user_module
        Partition.require_kept(module)
        if self._built is None or not self._built.is_of(module):
            self.model = self.precision_plugin.convert_module(module)
            options = BuildOptions(
                self.options,
                self.zero,
                self._sources,
                self.fp8,
                self.micro_batch_size,
                self._split_batch,
                self.micro_batch_rows,
            )
            around = Surroundings(
                precision=str(self.precision_plugin.precision),
                context=partial(step_context, self.precision_plugin),
                loop=TrainerLoop(module),
                tracer=self._tracer,
                guard=self.guard,
                materialize=self._materialize,
                shape_only=self._shape_only,
                equal_copies=self._on_accelerator,
                reads=HookReads,
            )
            self._built = build(module, self.mesh, self.root_device, options, around)
            self._made_steps = TrainerSteps(module, self._built, self.zero, self.precision_plugin)
        self.model_to_device()

    @property
    def _steps(self) -> TrainerSteps:
        return require(self._made_steps, "a model", BUILT)

    def _make_pace(self) -> Pace | None:
        """Make what compares the pace of the ranks, unless nobody wants to know or there is one
        rank."""
        watched = self.reliability
        if watched.slow_rank_factor is None or self.world_size == 1 or self._shape_only:
            return None
        return Pace(
            self.mesh,
            self.root_device,
            self._tracer.recorder,
            watched.slow_rank_factor,
            watched.slow_rank_steps,
        )

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        built = self.built
        with optimizers_of_a_stage(self.mesh.index("pp")):
            super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.root_device)
        # before the backend replaces the parameters in the groups
        built.group_names = name_groups(built.module, self.optimizers[0])
        self.optimizers = [built.backend.prepare(built.module, self.optimizers[0])]
        # Gradients are made inside training_step, after this strategy zeroed them; Lightning would
        # wipe them between it and the step.
        self.user_module.optimizer_zero_grad = _keep_gradients  # type: ignore[method-assign]
        self.precision_plugin.clip_gradients = self._steps.clip  # type: ignore[method-assign]

    @override
    def model_to_device(self) -> None:
        self.built.shard()  # first: with ZeRO-3 the whole parameters would not fit on the device
        self.built.module.to(self.root_device)

    # Steps

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch to the device. Of a training batch, the host keeps the values by which
        models choose their attention."""
        if not self.user_module.trainer.training:
            return super().batch_to_device(batch, device, dataloader_idx)
        self._first_step.begin_batch()
        with self.built.known.moving():
            return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of all micro-batches. For the last batch of a step, Lightning
        calls this from within `optimizer_step`, in its closure; the gradients are reduced here."""
        batch, *rest = (*args, *kwargs.values())
        built = self.built
        step = built.loop.steps
        self.heartbeat.enter(STEP, step + 1)
        running, outputs = self._steps.add(batch, tuple(rest))
        self._last_step = running.result
        if not running.launches_first:
            # after last_step is set, which callbacks read when the run stops here
            running.publish()
        if not running.has_all:  # further batches of the step follow
            self.heartbeat.enter(BETWEEN)
        elif self._replicas is not None:
            self._replicas.before_optimizer(built, step, self._store.outcome.saved)
        return outputs

    def refresh_master_weights(self) -> None:
        """Let the optimizer take over values that were written into parameters since its last step
        through `parameter.data`, by a collective of torch.distributed or through NumPy. Call it on
        all ranks.

        What operations of torch write into a parameter itself, under `torch.no_grad()`, is taken
        over without it.
        """
        self.built.backend.follow_writes()

    @property
    def trace_every_n_steps(self) -> int | None:
        """Every how many optimizer steps one is traced; None: only steps requested with
        `trace_next_step()`."""
        return self._tracer.every

    def trace_next_step(self) -> None:
        """Trace the next optimizer step, whatever `trace_every_n_steps` is. Call it on all ranks,
        for example from a callback's hook."""
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
        with self.heartbeat.during(EVALUATING):
            return self.built.evaluate(hook, batch, tuple(rest))

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Call the precision plugin's hooks before and after the backward. The backward itself
        already ran inside `training_step`."""
        with self._steps.hooks.watching():
            closure_loss = self.precision_plugin.pre_backward(closure_loss, self.user_module)
            return self.precision_plugin.post_backward(closure_loss, self.user_module)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with self._steps.reads.paused():  # a user's `optimizer_step` is a hook, too
            return self._optimizer_step(optimizer, closure)

    def _optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        built = self.built
        result, step = self._steps.run(optimizer, closure)
        step.trace = self._tracer.finish(built.backend)
        if self._pace is not None:
            self._pace.after_step()
            step.slowest = self._pace.slowest
        self.heartbeat.end_step()
        self._first_step.end_step()
        return result

    # The end

    @override
    def _refuse_inside_step(self, what: str) -> None:
        if self._built is not None:
            self._built.runner.refuse_inside(what, gathers=what == "all_gather")

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Report the exception to the other ranks before any connection is closed, so that the
        cause is shown once and no rank waits.

        SIGTERM, and a step that is not finite, end all ranks together: a save that is under way is
        finished first.
        """
        self._ending = Ending.by(exception)
        if self._mesh is None and self._failures is None:
            # this rank was not connected yet: there is nothing to report, and no one to report it
            # to
            return
        if self._ending is Ending.TOGETHER:
            self._store.finish()  # before the message, which names the newest checkpoint
        self._report_end(exception)
        if self._failures is not None:
            self._failures.note(self._explained(exception))

    def _explained(self, exception: BaseException) -> BaseException:
        """Return an error that explains that memory ran out, or why code fails in this layout; any
        other exception as it is."""
        folder = Path(self.user_module.trainer.default_root_dir)
        lacks = explain(
            exception,
            self._built,
            self.heartbeat.describe(),
            self.global_rank,
            self.root_device,
            folder,
        )
        return (
            lacks
            or self._first_step.explain(exception, self._mesh, self._built, self.zero_stage)
            or exception
        )

    @override
    def teardown(self) -> None:
        if self._pace is not None:
            self._pace.close()
        if self._built is not None:
            average = self._built.backend.average
            if average is not None and (self._ending is not Ending.ALONE or self.world_size == 1):
                # a validation failed while the average was in the place of the weights
                average.hide()
            around_hooks(None)
            self._built.close(whole=self._ending is Ending.NORMAL)
        self._stop_watching()  # a rank that ends from here on is no failure any more
        self._interface.restore()
        self._store.close(failed=self._ending is Ending.ALONE)
        module = self.lightning_module
        if module is not None:
            # else the launch failed, before Lightning attached the module
            if self._mesh is not None:
                forget_deferred(module.trainer)
            vars(module).pop("optimizer_zero_grad", None)
            if any(parameter.is_meta for parameter in module.parameters()):
                return  # refused half built: moving it to the CPU would fail and hide the refusal
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            "lightning_3d", cls, description=(cls.__doc__ or "").splitlines()[0]
        )


def _keep_gradients(*args: Any, **kwargs: Any) -> None:
    """Take the place of `LightningModule.optimizer_zero_grad` during a fit."""


if "lightning_3d" not in StrategyRegistry.available_strategies():
    Lightning3DStrategy.register_strategies(StrategyRegistry)
