"""The interface between a training step and the data-parallel ranks: gradients, their reduction,
the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.compat.torch import real_values
from lightning_3d.errors import ConfigError
from lightning_3d.options.zero import NONE, ZeroOptions
from lightning_3d.parallel.host_copy import HostCopy
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import OptimizerShard, ShardSpec
from lightning_3d.parallel.zero.average import WeightAverage
from lightning_3d.parallel.zero.gradients import EPSILON, clip_coefficient, scale_
from lightning_3d.parallel.zero.parameter_store import ParameterStore
from lightning_3d.parallel.zero.reducer import Reducer, take_first_copies
from lightning_3d.parallel.zero.stepper import Stepper
from lightning_3d.parallel.zero.trained import (
    Trained,
    TrainedParameters,
    check_dtypes,
    check_optimizer,
    check_place,
    check_zero,
    find_trained,
    names_in_order,
    require_same_order,
)
from lightning_3d.parallel.zero.user_hooks import UserHooks

Build = Callable[[TrainedParameters, ParameterStore, Optimizer], tuple[Stepper, Reducer]]


@dataclass(frozen=True)
class _Training:
    """Objects that exist from `prepare` to `teardown`.

    Attributes:
        reducer: sums gradients.
        stepper: runs the optimizer.
        others: parameters that are not trained.
        frozen: ids of those among them that did not require gradients when the fit began.
        copies: whether copies on tensor-parallel ranks take the reduced gradient of the first one.
        hooks: those of the user on gradients.
        trained: parameters that are trained.
        entries: the same by id.
    """

    reducer: Reducer
    stepper: Stepper
    others: Sequence[nn.Parameter]
    frozen: frozenset[int]
    copies: bool
    hooks: UserHooks
    trained: TrainedParameters
    entries: Mapping[int, Trained]


class DataParallelBackend:
    """Gradients and optimizer of one rank: a parameter store, a reducer and a stepper.

    One backend belongs to one mesh, one module and one optimizer.

    A step is::

        with backend.gradient_scope():
            ...                                    # forward and backward of all micro-batches
            backend.after_backward(parameters)     # after every action that adds to `.grad` of a stage's parameters
            backend.reduce(1 / tokens)             # all collectives over gradients happen here, once, and hooks of the user
        backend.grad_norm(), backend.clip(...)     # optional
        backend.step()

    With ZeRO 1 to 3, optimizer state and float32 master weights take 1 / (dp * cp) of their size,
    or 1 / (size * cp) with a shard size. With `reduce="micro_batch"` so do the sums of gradients,
    except of those that are still to be summed over other ranks: partial ones and those of tied
    parameters. At stage 1 with an all-reduce and without a shard size, `.grad` shows the whole
    reduced gradient until the step; with the other stages above 0 it shows nothing.

    Args:
        mesh: process groups.
        specs: where each trained parameter lies in the whole model, by its name in the module that
            `prepare` gets.
        store: where the values of parameters are kept.
        build: function that takes over the gradients of parameters and the step of their optimizer,
            as `make_backend` chose.
        zero: resolved options.
        bucket_bytes: upper bound of the bytes of one message of gradients.
        equal_copies: see `make_backend`.
        stages: for each pipeline stage on this rank its parameters, in the order in which the
            forward uses them. None: one stage with all.
        precision: "fp32", "fp64", "bf16" or "bf16_mixed". With "bf16" the parameters are bf16;
            gradients are summed and reduced in float32, and the optimizer updates float32 master
            weights. With the others all of these have the parameters' type.

    Attributes:
        average: the moving average of the trained weights, between `keep_average` and `teardown`;
            None if none is kept.
    """  # noqa: E501

    def __init__(
        self,
        mesh: Mesh,
        specs: Mapping[str, ShardSpec],
        store: ParameterStore,
        build: Build,
        zero: ZeroOptions,
        *,
        bucket_bytes: int,
        equal_copies: bool = False,
        stages: Sequence[Sequence[nn.Parameter]] | None = None,
        precision: str = "fp32",
    ) -> None:
        self._mesh, self._specs = mesh, specs
        self._store, self._build, self._zero = store, build, zero
        self._bucket_bytes, self._equal_copies = bucket_bytes, equal_copies
        self._stages, self._precision = stages, precision
        self._prepared: _Training | None = None
        self._ended: list[OptimizerShard] | None = None
        self._ended_average: list[OptimizerShard] = []
        self._ended_buffers: dict[str, Tensor] = {}
        self._ended_decay: float | None = None
        self.average: WeightAverage | None = None
        self._norm: tuple[Tensor, HostCopy] | None = None
        self._known_norm: float | None = None
        self._skip: Tensor | None = None
        self._can_skip: bool | None = None
        self._absent: list[nn.Parameter] = []
        self._reduced = False

    @property
    def _training(self) -> _Training:
        if self._prepared is None:
            raise RuntimeError("The backend has no optimizer yet: call prepare() first.")
        return self._prepared

    # Parameters

    def shard(
        self,
        module: nn.Module,
        models: Sequence[Sequence[nn.Module]],
        device: torch.device,
        is_active: Callable[[nn.Module], bool],
    ) -> None:
        """Shard the parameters of `module` over the data-parallel ranks if the ZeRO stage does so.
        Call it before `prepare` and before evaluation.

        Args:
            module: this rank's part of the model.
            models: for each model in `module`, the trained one first, its blocks in the order in
                which they are called: modules whose parameters may be gathered apart from the
                others.
            device: device on which shards are kept and parameters are gathered; `module` may be on
                another one.
            is_active: whether a call of a block will run it.
        """
        self._store.shard(module, models, device, is_active)

    def parameters_in_use(self) -> AbstractContextManager[None]:
        """Context of the forward and backward of a batch, in which parameters are whole."""
        return self._store.parameters_in_use()

    def weight_shards(self) -> list[OptimizerShard]:
        """This rank's part, under the key "weight", of each parameter that is sharded over the
        data-parallel ranks: a view, which may be empty."""
        return self._store.weight_shards()

    def make_whole(self) -> None:
        """Undo `shard`: every parameter has its value again, on the CPU. Collective."""
        self._store.make_whole()

    def abandon(self) -> bool:
        """Leave the modules unchanged after a failure; call it instead of `make_whole`. Local.

        Returns:
            Whether parameters stay without values, because other ranks have them.
        """
        return self._store.abandon()

    # Gradients

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Take over the gradients of `module`, this rank's part of the model, and the step of
        `optimizer`. Called once.

        Returns:
            The optimizer whose `param_groups` learning-rate schedulers drive: the user's own
                object.

        Communicates: one small all-reduce over the data-parallel ranks in host memory, and what
        DeepSpeed does.

        Raises:
            ConfigError: types of parameters, or an optimizer, that this backend cannot train
                exactly; or parameters in another order than on other ranks.
        """
        self._ended = self._can_skip = None
        self._ended_average, self._ended_buffers, self._ended_decay = [], {}, None
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        stages = self._stages if self._stages is not None else [list(module.parameters())]
        found = find_trained(module, optimizer, self._specs)
        self._require_same_order(found, stages, optimizer)
        trained = TrainedParameters(self._mesh, found, stages, device)
        self._check(trained.entries, optimizer, device)
        stepper, reducer = self._build(trained, self._store, optimizer)
        chosen = {id(parameter) for parameter in trained.parameters}
        others = [parameter for parameter in module.parameters() if id(parameter) not in chosen]
        frozen = frozenset(id(parameter) for parameter in others if not parameter.requires_grad)
        copies = self._equal_copies and self._mesh.size("tp") > 1 and not trained.first_copies
        untrained = {
            name: parameter
            for name, parameter in module.named_parameters()
            if id(parameter) not in chosen
        }
        hooks = UserHooks(trained, untrained, self._zero.stage, self._store.weight_shards)
        entries = {id(entry.parameter): entry for entry in trained.entries}
        self._prepared = _Training(
            reducer, stepper, others, frozen, copies, hooks, trained, entries
        )
        return optimizer

    def _require_same_order(
        self,
        found: Sequence[Trained],
        stages: Sequence[Sequence[nn.Parameter]],
        optimizer: Optimizer,
    ) -> None:
        """Compare the orders of parameters on which messages depend: of the module, and with ZeRO
        of the optimizer."""
        groups = (
            [group["params"] for group in optimizer.param_groups] if self._zero.stage > 0 else []
        )
        require_same_order(names_in_order(found, (*stages, *groups)), self._mesh.data_control)

    def _check(
        self, trained: Sequence[Trained], optimizer: Optimizer, device: torch.device
    ) -> None:
        zero = self._zero
        check_dtypes(trained, self._precision)
        check_optimizer(optimizer, trained, zero.stage, device, self._mesh.layout)
        check_place(optimizer, offloaded=zero.offload != NONE)
        if zero.stage > 0:
            check_zero(trained, zero.stage)

    def find_hooks(self) -> None:
        """Find the user's hooks on gradients, which are then called in `reduce`. Call it before
        each batch; the first call is collective.

        Raises:
            ConfigError: hooks that cannot be called as one process calls them.
        """
        self._training.hooks.find()

    @contextmanager
    def gradient_scope(
        self, *, begins: bool = True, ends: bool = True, overlap: bool = True
    ) -> Iterator[None]:
        """Context of the forward and backward of one batch. An optimizer step has several such
        contexts if gradients accumulate over batches.

        When its body raises, nothing more is sent: other ranks would wait for it.

        Args:
            begins: whether the batch is the first of an optimizer step, so that there are no
                gradients yet.
            ends: whether the batch is the last of an optimizer step, in which gradients are
                reduced.
            overlap: gradients may be reduced as soon as they are complete, while their stage and
                others still compute.
        """
        training = self._training
        for parameter in training.others:
            parameter.grad = None
            if parameter.requires_grad and id(parameter) in training.frozen:
                raise ConfigError(
                    "A parameter that was frozen when the fit began now requires gradients."
                    " Unfreezing during a fit is not supported: its gradient would not be reduced."
                    " Unfreeze it before trainer.fit, in a second fit for example."
                )
        if begins:
            self._norm = self._known_norm = self._skip = None
            self._reduced, self._absent = False, []
            training.reducer.clear()
            training.reducer.begin()
        training.reducer.ends, training.reducer.overlaps = ends, ends and overlap
        with training.hooks.deferred(alone=begins and ends), training.reducer.adding_up():
            yield
        if ends and not self._reduced:
            raise RuntimeError(
                "The gradients were not reduced inside their scope; call reduce() after the last"
                " backward."
            )

    def before_last_backward(self, stage: int) -> None:
        """Take note that the last backward of a stage begins, in which its gradients become
        complete one after the other. They may be reduced meanwhile.

        Args:
            stage: index of the stage among this rank's, from 0.
        """
        self._training.reducer.before_last_backward(stage)

    def after_backward(
        self, parameters: Iterable[nn.Parameter], *, stage: int = 0, last: bool = False
    ) -> None:
        """Take note of an action that may have added to the gradients of `parameters`, which are
        those of one pipeline stage. Moves bf16 gradients to float32 sums and starts the reduction
        of what is complete.

        Args:
            parameters: those of the stage.
            stage: index of the stage among this rank's, from 0.
            last: its gradients are complete.
        """
        self._store.before_gradients_are_taken()
        self._training.reducer.after_backward(parameters, stage=stage, last=last)
        self._store.after_backward()  # free blocks only when their gradients have been taken

    def local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's sum of a parameter's gradients before `reduce`; None if nothing has arrived.

        Where micro-batches are reduced at once, the sum over the data-parallel ranks of the
        elements that this rank keeps.
        """
        return self._training.reducer.local_gradient(parameter)

    def reduce(self, scale: float | Tensor) -> None:
        """Turn the local gradients into those of the whole batch. Called once, inside the scope, by
        all ranks.

        Partial tensor-parallel gradients and those of tied copies are summed, then all are summed
        over the data-parallel ranks and multiplied by `scale`. With `equal_copies`, tensor-parallel
        copies then take the gradient of the first one. A rank that has no gradient for a parameter
        counts as zero; a parameter that no rank has a gradient for is left unchanged by `step`.

        Args:
            scale: a number or a tensor of shape () on the parameters' device; the same on all
                ranks.
        """
        if self._reduced:
            raise RuntimeError("The gradients of this step are already reduced.")
        training = self._training
        self._absent = training.reducer.reduce(scale)
        if training.copies:
            take_first_copies(
                self._mesh, training.stepper.gradients_by_parameter(), self._bucket_bytes
            )
        training.stepper.take_gradients()
        training.hooks.call(training.stepper, self._absent)
        self._reduced = True

    def norm_on_device(self) -> Tensor:
        """Euclidean norm of the whole model's gradient before clipping, the same on every rank:
        float64, shape ().

        One all-reduce at the first call in a step, which all ranks make.
        """
        if self._norm is None:
            norm = self._training.stepper.gradient_norm()
            self._norm = norm, HostCopy(norm)
        return self._norm[0]

    def grad_norm(self) -> float:
        """The number in `norm_on_device`. Waits for the device until the norm is computed, not for
        what was launched after it."""
        if self._known_norm is None:
            self.norm_on_device()
            assert self._norm is not None
            self._known_norm = float(self._norm[1].wait())
        return self._known_norm

    @property
    def can_skip_on_device(self) -> bool:
        """Whether the optimizers of all ranks take `skip_where`. The first call in a fit is
        collective: one all-reduce in host memory."""
        if self._can_skip is None:
            with real_values():
                own = torch.tensor(int(self._training.stepper.can_skip))
                # a group with other options may have parameters on some stages only
                if self._mesh.layout.world_size > 1:
                    dist.all_reduce(own, dist.ReduceOp.MIN, group=self._mesh.world_control)
                self._can_skip = bool(own)
        return self._can_skip

    def skip_where(self, skip: Tensor) -> None:
        """Let the device decide whether this step is taken, so that the host can launch it without
        waiting. Call it before `clip`.

        `clip` and `step` then leave gradients, weights and state as they are where `skip` is 1, and
        the gradients stay until `end_step` or `discard`.

        Args:
            skip: 1.0 or 0.0, float32, shape (), on the device; the same on all ranks.
        """
        self._skip = skip

    def clip(self, *, max_norm: float | None = None, value: float | None = None) -> None:
        """Scale the gradients down to a global norm of at most `max_norm`, or clamp each element to
        [-value, value]."""
        # Where the host knows the norm, it can leave out a product with 1.
        if max_norm is not None and (
            self._known_norm is None or not self._known_norm + EPSILON <= max_norm
        ):
            coefficient = clip_coefficient(self.norm_on_device(), max_norm)
            scale_(
                list(self.reduced_gradients()),
                (
                    coefficient
                    if self._skip is None
                    else torch.where(self._skip > 0, 1.0, coefficient)
                ),
            )
        if value is not None:
            for gradient in self.reduced_gradients():
                limit: Any = (
                    value
                    if self._skip is None
                    else torch.where(self._skip > 0, torch.inf, gradient.new_full((), value))
                )
                gradient.clamp_(-limit, limit)

    def trains(self, parameter: Tensor) -> bool:
        """Whether the optimizer trains a parameter. Local."""
        return id(parameter) in self._training.entries

    def shows_gradient(self, parameter: Tensor) -> bool:
        """Whether `.grad` of a trained parameter is what the optimizer steps with, so that hooks
        can read and change it. Local."""
        return self._training.reducer.shows_gradient(parameter)

    def counts_gradient(self, parameter: Tensor) -> bool:
        """Whether this rank adds the gradient of a trained parameter to a sum over `norm_group`,
        where each element counts once. Local."""
        training = self._training
        return training.trained.counts(training.entries[id(parameter)])

    @property
    def norm_group(self) -> dist.ProcessGroup | None:
        """The ranks that count every element of the model once (`counts_gradient`); None: all."""
        return self._mesh.group("tp", "cp", "pp") if self._mesh.layout.ep == 1 else None

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        return self._training.trained.device

    def measure_again(self) -> None:
        """Forget the gradient norm, because something has changed the gradients since. Local; all
        ranks call it."""
        self._norm = self._known_norm = None

    def reduced_gradients(self) -> Iterator[Tensor]:
        """The gradients that this rank's optimizer steps with, after `reduce`. Local."""
        return self._training.stepper.gradients()

    # Steps

    def step(self) -> None:
        """Run the optimizer on the reduced gradients and bring the new weights to all ranks that
        use them."""
        self._training.stepper.follow_writes()  # also those of hooks of this step
        self._training.stepper.step(self._absent, self._skip)
        if self._skip is None:
            self.end_step()

    def end_step(self) -> None:
        """Drop gradients that nobody needs after a step. `step` does so itself, unless the device
        decides about it. Local."""
        self._training.stepper.discard()
        if self._zero.stage > 0:
            self._training.reducer.clear()

    def discard(self) -> None:
        """Drop the reduced gradients, instead of `step`. Weights and the optimizer's state stay as
        they are. Local."""
        self._training.stepper.discard()
        self._training.reducer.clear()

    def refresh_master_weights(self) -> None:
        """Take over values that were written into the module's parameters from outside, by a
        checkpoint for example. Local.

        Does nothing before `prepare`: an evaluation has no master weights.
        """
        if self._prepared is not None:
            self._prepared.stepper.refresh_master_weights()

    def follow_writes(self) -> None:
        """Take over what was written into parameters while a model trains, also through `.data`.
        Local.

        Unlike `refresh_master_weights`, master weights that round to their parameters keep all
        their digits.
        """
        if self._prepared is not None:
            self._prepared.stepper.follow_writes(unseen=True)

    def require_seen_writes(self) -> None:
        """Refuse values that were written through `.data`, which the next step would overwrite.
        Collective: one all-reduce in host memory. The host waits for the device.

        Raises:
            ConfigError: on all ranks.
        """
        found = self._training.stepper.unseen_writes()
        with real_values():
            flags = torch.stack([flag for _, flag in found]).tolist() if found else []
            names = [name for (name, _), flag in zip(found, flags, strict=True) if flag]
            count = torch.tensor(len(names))
            if self._mesh.layout.world_size > 1:
                dist.all_reduce(count, dist.ReduceOp.MAX, group=self._mesh.world_control)
        if int(count):
            what = f"'{names[0]}'" if names else "A parameter"
            raise ConfigError(
                f"{what} was written through .data, which is not seen: the optimizer's step would"
                " overwrite it with its master weights. Write into the parameter itself under"
                " torch.no_grad() (parameter.mul_(0.5), for example), or call"
                " refresh_master_weights() of the strategy after the write."
            )

    def optimizer_shards(self, *, to_save: bool = False) -> list[OptimizerShard]:
        """This rank's optimizer state of each trained parameter, for checkpoints: views; after
        `teardown` copies in host memory. Local.

        Empty before `prepare`.

        Args:
            to_save: master weights are those that the next step starts from, also if a callback has
                written into parameters since the last one; these are copies then.
        """
        if self._ended is not None:
            return self._ended
        return self._prepared.stepper.shards(to_save=to_save) if self._prepared is not None else []

    def keep_average(self, module: nn.Module, decay: float) -> None:
        """Keep a moving average of the trained weights and the buffers of `module`, see
        `WeightAverage`. Call it after `prepare`. Local."""
        self.average = WeightAverage(self._training.stepper, module, decay)

    @property
    def keeps_average(self) -> bool:
        """Whether checkpoints of this fit will have an average of the weights."""
        return self.average is not None

    @property
    def average_decay(self) -> float | None:
        """Decay of the average that `average_shards` returns; None if there is none yet. The same
        on all ranks, after `teardown` too."""
        if self.average is None:
            return self._ended_decay
        return self.average.decay if self.average.begun else None

    def average_shards(self) -> list[OptimizerShard]:
        """This rank's elements of the average, for checkpoints: views; after `teardown` copies in
        host memory. Empty if there is none yet. Local."""
        return self.average.shards() if self.average is not None else self._ended_average

    def average_buffers(self) -> dict[str, Tensor]:
        """The average of this rank's buffers by their names, for checkpoints; after `teardown`
        copies in host memory. Empty if there is none yet. Local."""
        return self.average.saved_buffers() if self.average is not None else self._ended_buffers

    def create_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor | float]]) -> None:
        """Make the optimizer's state as it would be after some steps, for a checkpoint to be read
        into. Local.

        Args:
            state: by parameter name and key: numbers and tensors of shape () that belong to the
                whole parameter, which are used as they are, and tensors with a value for each
                element (on meta), for which zeros of this rank's shape are made.
        """
        self._training.stepper.create_state(state)

    def held(self) -> dict[str, list[Tensor]]:
        """The tensors that are held at this moment, for memory accounts. Several may share their
        memory. Local.

        Returns:
            Under "parameters" those apart from the module's own, "gradients" and their buffers,
            "optimizer" state, master weights and the average.
        """
        held: dict[str, list[Tensor]] = {"parameters": [], "gradients": [], "optimizer": []}
        if self._prepared is not None:
            held = self._prepared.stepper.held()
            held["gradients"] += self._prepared.reducer.held()
        if self.average is not None:
            held["optimizer"] = [*held["optimizer"], *self.average.held()]
        held["parameters"] += self._store.held()
        return held

    def teardown(self) -> None:
        """Let go of the module, the optimizer and all process groups. Local; may be called
        twice."""
        if self._ended is None:
            self._ended = [shard.to_host() for shard in self.optimizer_shards(to_save=True)]
            if self.average is not None and not self.average.shown:  # else a validation has failed
                self._ended_decay = self.average_decay
                self._ended_average = [shard.to_host() for shard in self.average_shards()]
                self._ended_buffers = {
                    name: value.to("cpu", copy=True)
                    for name, value in self.average_buffers().items()
                }
        if self._prepared is not None:
            self._prepared.reducer.close()
            self._prepared.stepper.release()
        self._prepared = self.average = None
        self._absent = []
