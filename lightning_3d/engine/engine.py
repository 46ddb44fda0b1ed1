"""`Engine`: trains a model in a loop of the user's, without Lightning's Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.checkpoint import (
    CheckpointStore,
    LocalState,
    describe_optimizer,
    load_optimizer,
    load_weights,
    name_groups,
    saved_generators,
    share_groups,
    take_groups,
)
from lightning_3d.compat.batches import move_data_to_device
from lightning_3d.compat.lightning_loops import lightning_version, loops_after
from lightning_3d.compat.transformers import describe_models
from lightning_3d.engine.arithmetic import Arithmetic
from lightning_3d.engine.build import BuildOptions, ModelSources, Surroundings, build
from lightning_3d.engine.float8 import require_fp8
from lightning_3d.engine.holder import ModelHolder, Step, logits_of_model, loss_of_model
from lightning_3d.engine.loop import BatchOrigin
from lightning_3d.engine.nonfinite import StepGuard, require_finite_weights, trained_weights
from lightning_3d.engine.optimizer_step import OptimizerStep
from lightning_3d.engine.step.tracer import StepTracer
from lightning_3d.engine.whole_weights import GatheredTensors, whole_weights
from lightning_3d.engine.world import connect, own_device, ranks_of_a_node, require_unbound
from lightning_3d.errors import CallOrderError, ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.micro_batch_rows import MicroBatchRows
from lightning_3d.layout.resolve import resolve_available
from lightning_3d.layout.sizes import check_sizes
from lightning_3d.options.checkpoints import CheckpointOptions
from lightning_3d.options.model import ModelOptions
from lightning_3d.options.options import Options
from lightning_3d.options.precision import precision_of
from lightning_3d.options.reliability import IGNORE
from lightning_3d.options.schema import options_of, refuse_unknown
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.weights.initialize import initialize

_STATE = "lightning_3d_engine"
"""Key in a checkpoint: what the user has passed to `save`."""


_OF_TRAINER = {
    "elastic",
    "trace_every_n_steps",
    "reliability",
    *(entry.name for entry in options_of(CheckpointOptions)),
}
"""Options of the strategy that need its Trainer."""

_OPTIONS = [entry.name for entry in options_of(Options) if entry.name not in _OF_TRAINER]


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of an optimizer step, the same on every rank.

    Attributes:
        loss: mean over all batches of the step (per target token, or per row where the loss is not
            that of `model.loss_function`).
        grad_norm: norm of all gradients before clipping.
        weight: target tokens (or rows) of all batches.
        skipped: whether the optimizer skipped the step, because loss or norm is not finite.
    """

    loss: float
    grad_norm: float
    weight: float
    skipped: bool


class _OwnLoop:
    """The user's loop, see `engine.loop.Loop`.

    Attributes:
        steps: optimizer steps taken or skipped.
        accumulates: batches of an optimizer step, as far as is known when it begins; None if they
            are not.
        optimizer: this rank's; None without training.
    """

    def __init__(self, accumulates: int | None) -> None:
        self.steps, self.accumulates = 0, accumulates
        self.optimizer: Optimizer | None = None

    @property
    def learning_rate(self) -> float:
        assert self.optimizer is not None
        return float(self.optimizer.param_groups[0]["lr"])

    def origin(self, hook: str) -> BatchOrigin:
        return BatchOrigin()

    def quietly(self) -> AbstractContextManager[None]:
        return nullcontext()


class Engine:
    """Trains a model over tensor x pipeline x data x context x expert parallel ranks with ZeRO, in
    a loop of the user's.

        engine = Engine(model, "tp2_pp2", optimizer=torch.optim.AdamW, micro_batch_size=2)
        for batch in loader:
            engine.forward_backward(batch)
            numbers = engine.optimizer_step()

    Every process makes an engine with the same arguments and calls the same methods. It uses the
    default process group if there is one, else it makes one from the variables of torchrun, or for
    this process alone. Ranks with the same `data_rank` pass the same batches.

    Args:
        model: a causal LM of Transformers, or any module with a parallel plan; or a function that
            makes it, which is called on the meta device, so that no rank ever holds the whole
            model. It is partitioned in place.
        layout: name such as "tp2_pp2_dp2", or a `Layout`. None: data parallelism over all ranks.
        optimizer: function that makes an optimizer from this rank's trained parameters, a list with
            one parameter group. None: an engine that does not train.
        accumulate_grad_batches: number of batches of an optimizer step. None: those that
            `optimizer_step` finds. With the number, gradients are reduced while the last backward
            still runs.
        max_norm: largest norm of the gradients; larger ones are scaled down. None: no limit.
        precision: "32-true", "64-true", "bf16-true" or "bf16-mixed", as in Lightning's Trainer.
            None: the type of the model's parameters.
        device: this rank's. None: its GPU, or the CPU where there is none.
        options: micro_batch_size, zero_stage and all others of `Lightning3DStrategy`, with the same
            names, defaults and meaning, except those that its Trainer is needed for: elastic,
            trace_every_n_steps, reliability and checkpoint_*.

    Attributes:
        model: this rank's part of the model.
        optimizer: what `optimizer` made, whose param_groups learning-rate schedulers drive; None
            without training.
        layout: the layout.
        steps: number of optimizer steps, with those that were skipped.

    Raises:
        LayoutError, PlanError, ConfigError, DataError: the message says what is wrong and what
            works.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        layout: str | Layout | None = None,
        optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
        *,
        accumulate_grad_batches: int | None = None,
        max_norm: float | None = None,
        precision: str | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        refuse_unknown("Engine", options, _OPTIONS)
        chosen = Options(layout, **options)
        if accumulate_grad_batches is not None:
            check_sizes(accumulate_grad_batches=accumulate_grad_batches)
        self._device = torch.device(device) if device is not None else own_device()
        self._wait = chosen.timeout or timedelta(minutes=30)
        self._owns_group = connect(self._device, self._wait)
        resolved, schedule = resolve_available(
            chosen.layout, chosen.schedule, chosen.vp, chosen.order
        )
        self.layout = resolved if resolved is not None else Layout(dp=dist.get_world_size())
        model_options = ModelOptions.read(chosen, schedule)
        model_options.require_suit(self.layout)
        zero = ZeroOptions.of(chosen).resolve(schedule, self.layout.pp).over(self.layout)
        require_unbound(self.layout)
        self._about = {"layout": self.layout.name, "schedule": schedule, "zero_stage": zero.stage}
        mesh = Mesh(
            self.layout,
            timeout=self._wait,
            node_size=model_options.experts.moe_node_size or ranks_of_a_node(),
        )
        mesh.shard_data(zero.shard_size)
        mesh.warm_up()
        self._arithmetic, root = self._read_model(model, precision)
        precision_of(self._arithmetic.name, fp8=chosen.fp8)
        if chosen.fp8:
            require_fp8(self._device)
        self._batches_of_step, self._max_norm = accumulate_grad_batches, max_norm
        self._loop = _OwnLoop(accumulate_grad_batches)
        dp = mesh.size("dp")
        build_options = BuildOptions(
            model_options,
            zero,
            ModelSources(chosen.plan, chosen.pipeline_module, chosen.self_check, chosen.seed),
            chosen.fp8,
            chosen.micro_batch_size,
            chosen.split_batch,
            MicroBatchRows(dp, dp, chosen.micro_batch_size or 1),
        )
        self._guard = StepGuard(chosen.nonfinite)
        around = Surroundings(
            precision=self._arithmetic.name,
            context=self._arithmetic.context,
            loop=self._loop,
            tracer=StepTracer(),
            guard=self._guard,
            materialize=initialize,
            equal_copies=self._device.type != "cpu",
        )
        self._built = build(root, mesh, self._device, build_options, around)
        self._built.runner.scale.short_steps_weigh_less = False
        self._built.shard()  # first: with ZeRO-3 the whole parameters would not fit on the device
        root.to(self._device)
        self._built.begin_fit()
        self._root = root
        self._store = CheckpointStore()
        self._step: OptimizerStep | None = None
        if optimizer is not None:
            self._make_optimizer(optimizer)

    def _read_model(
        self, model: nn.Module | Callable[[], nn.Module], precision: str | None
    ) -> tuple[Arithmetic, ModelHolder]:
        """Make the model, where that is left to the engine, and convert it."""
        if not isinstance(model, nn.Module):
            with torch.device("meta"):
                model = model()
        arithmetic = Arithmetic.of(precision, model, self._device)
        return arithmetic, ModelHolder(arithmetic.convert(model))

    def _make_optimizer(self, make: Callable[[list[dict[str, Any]]], Optimizer]) -> None:
        """Make this rank's optimizer, and let ZeRO shard it.

        Raises:
            ConfigError: on all ranks: it trains nothing on any of them.
        """
        optimizer = make(
            [
                {
                    "params": [
                        parameter
                        for parameter in self._root.parameters()
                        if parameter.requires_grad
                    ]
                }
            ]
        )
        trained = sum(
            parameter.requires_grad
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        total = torch.tensor(trained, device=self._device)
        dist.all_reduce(total)
        if not total.item():
            raise ConfigError(
                "The optimizer trains nothing: on no rank it has a parameter with"
                " requires_grad=True."
            )
        # before the backend replaces the parameters in the groups
        self._built.group_names = name_groups(self._root, optimizer)
        self._loop.optimizer = self._built.backend.prepare(self._root, optimizer)

    # The model and the ranks

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model. Layers of other stages are absent."""
        return self._root.model

    @property
    def optimizer(self) -> Optimizer | None:
        """This rank's optimizer; None without training."""
        return self._loop.optimizer

    @property
    def steps(self) -> int:
        """Number of optimizer steps, with those that were skipped."""
        return self._loop.steps

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments of a `DistributedSampler` that gives ranks with the same data-parallel index
        the same batches."""
        mesh = self._built.mesh
        return {"num_replicas": mesh.size("dp"), "rank": mesh.index("dp")}

    # Steps

    def forward_backward(
        self, batch: Any, step: Step | None = None, *, last: bool | None = None
    ) -> dict[str, Any]:
        """Run forward and backward of a batch, over its micro-batches. After the last batch of an
        optimizer step, gradients are reduced.

        Args:
            batch: nested containers of tensors whose dimension 0 are rows, this data-parallel
                rank's part of the global batch. It may be on another device.
            step: function of the model and a micro-batch that returns a loss of shape (), or a
                mapping with the key "loss" and, if it weighs the loss itself, "loss_weight". On
                pipeline stages before the last one it ends inside the call of the model. None:
                `model(**batch).loss`.
            last: whether this is the last batch of its optimizer step. None: it is the
                `accumulate_grad_batches`-th; without that number, any batch may be.

        Returns:
            What the step returned, joined over micro-batches; before the last stage the loss alone.
            "loss" is the mean over the global batch, on the device.

        Raises:
            CallOrderError: the step has all of its batches already, or there is no optimizer.
            DataError, ConfigError: the batch cannot be split, or the loss of the parts is not that
                of the batch. An error drops the optimizer step with its earlier batches.
        """
        if self._loop.optimizer is None:
            raise CallOrderError(
                "This engine does not train: it was made without an optimizer. Pass Engine(...,"
                " optimizer=...)."
            )
        if self._step is not None and self._step.has_all:
            raise CallOrderError(
                "The optimizer step has all of its batches. Call optimizer_step() before the next"
                " forward_backward(). To accumulate gradients of more batches, pass a larger"
                " accumulate_grad_batches to Engine, or last=False with all batches but the last."
            )
        running = self._step or self._begin(last)
        ends = running.count + 1 == self._batches_of_step if last is None else last
        # An error drops the step: its gradients may have a part of this batch.
        self._step = None
        # the host keeps the values by which models choose their attention
        with self._built.known.moving():
            placed = self._placed(batch)
        outputs = running.add(placed, (step or loss_of_model,), ends=ends)
        self._step = running
        return outputs if ends else running.publish()

    def _begin(self, last: bool | None) -> OptimizerStep:
        """Begin an optimizer step. A first batch that is not the last one has a successor that
        weighs as much."""
        self._loop.accumulates = self._batches_of_step
        if last is not None:
            self._loop.accumulates = 1 if last else max(2, self._batches_of_step or 2)
        return OptimizerStep(self._built)

    def optimizer_step(self) -> StepNumbers:
        """Clip the gradients, and step the optimizer unless a loss or the norm of the gradients is
        not finite.

        The optimizer is launched before its numbers are read, where the device itself can skip it.

        Raises:
            CallOrderError: no batch, or not all that were announced, were passed to
                `forward_backward`.
            NonFiniteError: on all ranks, with nonfinite="stop".
        """
        step = self._step
        if step is None:
            raise CallOrderError(
                "There is nothing to step with: call forward_backward() before optimizer_step()."
            )
        if not step.has_all and self._batches_of_step is not None:
            raise CallOrderError(
                f"The optimizer step has {step.count} of {self._loop.accumulates} batches. Call"
                " forward_backward() with the others first, or pass last=True with the last one."
            )
        self._step = None
        if not step.has_all:
            step.end()
        # Only here: the user may have changed gradients.
        step.measure(launch_first=True)
        if not step.launches_first:
            step.publish()
        step.take(self._clip, step.publish)
        self._loop.steps += 1
        assert step.result is not None and step.result.grad_norm is not None
        loss, weight = step.totals()
        return StepNumbers(loss, step.result.grad_norm, weight, step.result.skipped)

    def _clip(self) -> None:
        if self._max_norm is not None:
            self._built.clip(self._max_norm)

    def forward(self, batch: Any, step: Step | None = None) -> Any:
        """Run a forward of a batch in evaluation mode, without gradients, over its micro-batches.

        Args:
            step: function of the model and a micro-batch that returns a tensor, or a mapping of
                tensors. It must end after the call of the model on all ranks alike. None:
                {"logits": model(**batch).logits}.

        Returns:
            What the step returned, on every rank of the pipeline: rows of micro-batches are
                concatenated, numbers averaged.

        Raises:
            CallOrderError: in the middle of an optimizer step.
        """
        self._refuse_inside_step("forward()")
        with torch.no_grad(), self._evaluating():
            return self._built.evaluate("predict", self._placed(batch), (step or logits_of_model,))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self._root.modules()]
        self._root.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def _placed(self, batch: Any) -> Any:
        return self._arithmetic.convert_batch(move_data_to_device(batch, self._device))

    def _refuse_inside_step(self, what: str) -> None:
        if self._step is not None:
            raise CallOrderError(
                f"Gradients of a step are in memory. Call optimizer_step() before {what}."
            )

    # Weights and checkpoints

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the weights, one whole tensor (or the experts of a layer) at a time.
        Collective: all ranks iterate to the end.

        Returns:
            Names and tensors as `save_pretrained` of Transformers writes them, on this rank's
            device; of other models as the model has them. A tensor belongs to the caller.

        Raises:
            CallOrderError: in the middle of an optimizer step.
        """
        self._refuse_inside_step("weights()")
        tensors = GatheredTensors(self._local_state(), self._root, self._device)
        return whole_weights(tensors, self._root, "model")

    def save(self, folder: str | os.PathLike[str], state: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint, which engines and `Lightning3DStrategy` load in every layout.
        Collective.

        Args:
            folder: its place, which appears when it is complete.
            state: what else `load` is to return, the same on all ranks: numbers, strings, tensors,
                lists and dicts, such as the state of a learning-rate scheduler and the place in the
                data.

        Raises:
            CallOrderError: in the middle of an optimizer step. CheckpointError: on all ranks.
            NonFiniteError: the weights are not finite, unless nonfinite="ignore".
        """
        self._refuse_inside_step("save()")
        optimizer = self._loop.optimizer
        if optimizer is not None and self._guard.how != IGNORE:
            weights = [value for _, value in trained_weights(self._root, self._built.backend)]
            require_finite_weights(weights, self._device, folder)
        checkpoint: dict[str, Any] = {
            "epoch": 0,
            "global_step": self.steps,
            "pytorch-lightning_version": lightning_version(),
            "state_dict": self._root.state_dict(),
            "loops": loops_after(self.steps),
            "callbacks": {},
            "lr_schedulers": [],
            _STATE: dict(state or {}),
        }
        if optimizer is not None:
            checkpoint["optimizer_states"] = [
                describe_optimizer(optimizer, self._built.group_names)
            ]
        about = self._about | {
            "precision": self._arithmetic.name,
            "transformers": describe_models(self._root),
        }
        checkpoint = share_groups(checkpoint, self._built.mesh)
        self._store.save(folder, checkpoint, self._local_state(), self._built.backend, about)

    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Load a checkpoint of an engine or of `Lightning3DStrategy`, of any layout: weights,
        optimizer, number of steps and generators of random numbers. Collective.

        Returns:
            The `state` that was passed to `save`; empty for a checkpoint of the strategy.

        Raises:
            CallOrderError: in the middle of an optimizer step. CheckpointError: on all ranks.
        """
        self._refuse_inside_step("load()")
        checkpoint, local, optimizer = (
            self._store.load(folder),
            self._local_state(),
            self._loop.optimizer,
        )
        load_weights(checkpoint, local)
        if optimizer is not None:
            self._built.backend.refresh_master_weights()
            own = take_groups(checkpoint, self._built.group_names)
            load_optimizer(own, local, optimizer, self._built.backend)
        self._loop.steps = int(checkpoint.get("global_step", 0))
        local.restore_generators(saved_generators(checkpoint, local))
        return dict(checkpoint.get(_STATE, {}))

    def _local_state(self) -> LocalState:
        built = self._built
        return LocalState(self._root, built.parts.specs, built.mesh, built.backend, self._device)

    # The end

    def close(self) -> None:
        """End training. Parameters that ZeRO-3 sharded are whole again, on the CPU. Collective."""
        self._store.close()
        self._built.close(whole=True)
        self._end_group()

    def _end_group(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # other ranks may be gone
            self._store.close(failed=True)
            self._built.close(whole=False)
