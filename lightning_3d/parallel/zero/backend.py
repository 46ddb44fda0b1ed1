"""The interface between a step of training and the data-parallel ranks: gradients, their reduction, the optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.config.options.zero import NONE, ZeroOptions
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import OptimizerShard, ShardSpec
from lightning_3d.parallel.zero.gradient_buffers import GradientSums
from lightning_3d.parallel.zero.gradient_norm import clip_coefficient
from lightning_3d.parallel.zero.offload import check_place
from lightning_3d.parallel.zero.partial_gradients import PartialSums

BUCKET_BYTES = 32 * 2**20
"""Bytes of one all-reduce of gradients: large enough that its latency does not count, small enough that copying the
next bucket overlaps with it."""

DATA_AXES = ("dp", "cp")
"""Ranks along these axes hold the same parameters and see different tokens: gradients are summed over them."""


@dataclass(frozen=True)
class Trained:
    """A parameter that the optimizer trains on this rank."""

    name: str
    parameter: nn.Parameter
    spec: ShardSpec


class DataParallelBackend(ABC):
    """Gradients and optimizer of one rank. One backend belongs to one mesh, one module and one optimizer.

    A step is::

        with backend.gradient_scope():
            ...                                    # forward and backward of all micro-batches
            backend.after_backward(parameters)     # after every action that adds to `.grad` of a stage's parameters
            backend.reduce(1 / tokens)             # all collectives over gradients happen here, once
        backend.grad_norm(), backend.clip(...)     # optional
        backend.step()

    Args:
        mesh: process groups.
        specs: where each trained parameter lies in the whole model, by its name in the module that `prepare` gets.
        bucket_bytes: upper bound of the bytes of one all-reduce of gradients, except for a single larger parameter.
        zero: what is sharded and when, resolved.
        stages: of each pipeline stage on this rank its parameters, in the order in which the forward uses them; None: one
            stage with all.
        precision: "fp32", "fp64", "bf16" or "bf16_mixed". With "bf16" the parameters are bf16; gradients are summed and
            reduced in float32, and the optimizer updates float32 master weights. With the others all of these have the
            parameters' type.
    """

    def __init__(
        self,
        mesh: Mesh,
        specs: Mapping[str, ShardSpec],
        *,
        zero: ZeroOptions,
        stages: Sequence[Sequence[nn.Parameter]] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        precision: str = "fp32",
    ) -> None:
        self._mesh = mesh
        self._zero = zero
        self._given_stages = stages
        self._specs = specs
        self._bucket_bytes = bucket_bytes
        self._precision = precision
        self._stages: Sequence[Sequence[nn.Parameter]] = ()
        self._trained: list[Trained] = []
        self._ended: list[OptimizerShard] | None = None
        self._others: list[nn.Parameter] = []
        self._frozen: set[int] = set()
        self._device = torch.device("cpu")
        self._sums = GradientSums(())
        self._partial = PartialSums(mesh, ())
        self._norm: float | None = None
        self._reduced = False
        self._waves: dict[int, int] = {}
        self._finished: set[int] = set()
        self._wave, self._overlaps = 0, False

    def shard(  # noqa: B027 - only stage 3 has something to do
        self, module: nn.Module, blocks: Sequence[nn.Module], device: torch.device, is_active: Callable[[nn.Module], bool]
    ) -> None:
        """Deal the parameters of `module` to the data-parallel ranks, where the stage does; before `prepare` and before evaluation.

        Args:
            blocks: modules whose parameters may be gathered apart from the others, in the order in which they are called.
            device: where parts are kept and parameters gathered; they may come from elsewhere.
            is_active: whether a call of a block will run it.
        """

    def parameters_in_use(self) -> AbstractContextManager[None]:
        """Holds forward and backward of a batch, during which parameters are whole."""
        return nullcontext()

    def held(self) -> dict[str, list[Tensor]]:
        """What it keeps at this moment, for accounts of memory: the tensors of "parameters" (apart from the module's own), "gradients" and
        "optimizer", which is state and master weights. Local."""
        arrived = [entry.parameter.grad for entry in self._trained if entry.parameter.grad is not None]
        return {"parameters": [], "gradients": [*self._sums.present(), *arrived], "optimizer": []}

    def weight_shards(self) -> list[OptimizerShard]:
        """What this rank has, under the key "weight", of each parameter that is dealt to the data-parallel ranks: a view, which may be
        empty."""
        return []

    def make_whole(self) -> None:  # noqa: B027
        """Undo `shard`: every parameter has its value again, on the CPU. Collective."""

    def abandon(self) -> bool:
        """After a failure, in the place of `make_whole`: leave the modules alone. Local.

        Returns:
            Whether parameters stay without values, because other ranks have them.
        """
        return False

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Take over the gradients of `module`, this rank's part of the model, and the step of `optimizer`. Called once.

        Returns:
            The optimizer whose `param_groups` learning-rate schedulers drive: the user's own object.

        Raises:
            ConfigError: types of parameters, or an optimizer, that this backend cannot train exactly.
        """
        self._trained = sorted(_trained(module, optimizer, self._specs), key=self._uneven)
        chosen = {id(entry.parameter) for entry in self._trained}
        self._ended = None
        self._others = [parameter for parameter in module.parameters() if id(parameter) not in chosen]
        self._frozen = {id(parameter) for parameter in self._others if not parameter.requires_grad}
        self._stages = self._given_stages if self._given_stages is not None else [list(module.parameters())]
        self._device = next((parameter.device for parameter in module.parameters()), self._device)
        self._check(optimizer)
        self._sums = GradientSums(entry.parameter for entry in self._trained)
        self._waves = self._complete_in()
        self._partial = PartialSums(self._mesh, [(entry.parameter, entry.spec) for entry in self._trained], self._waves)
        self._install(optimizer)
        return optimizer

    @contextmanager
    def gradient_scope(self, *, begins: bool = True, ends: bool = True, overlap: bool = True) -> Iterator[None]:
        """Holds forward and backward of one batch. An optimizer step has several where gradients accumulate over batches.

        When its body raises, nothing more is sent: other ranks would wait for it.

        Args:
            begins: it is the first of a step, before which there are no gradients.
            ends: it is the last of a step, in which they are reduced.
            overlap: the gradients of a stage may be reduced as soon as they are complete, while other stages still compute.
        """
        for parameter in self._others:
            parameter.grad = None
            if parameter.requires_grad and id(parameter) in self._frozen:
                raise ConfigError(
                    "A parameter that was frozen when the fit began requires gradients now. Unfreezing during a fit is not"
                    " supported: its gradient would not be reduced. Unfreeze before trainer.fit, in a second fit for example."
                )
        if begins:
            self._norm, self._reduced = None, False
            self._finished, self._wave = set(), 0
            self._begin_step()
        self._overlaps = ends and overlap
        yield
        if ends and not self._reduced:
            raise RuntimeError(
                "The gradients were not reduced inside their scope; call reduce() after the last backward."
            )

    def after_backward(self, parameters: Iterable[nn.Parameter], *, stage: int = 0, last: bool = False) -> None:
        """Called after each action that may add to the gradients of `parameters`, all those of one pipeline stage: moves bf16
        ones to float32 sums, and starts the reduction of what is complete.

        Args:
            stage: which of this rank's stages, counted from 0. last: its gradients are complete.
        """
        self._sums.absorb(parameters)
        if last and self._overlaps:
            self._finished.add(stage)
            while self._wave < self._last_wave and len(self._stages) - 1 - self._wave in self._finished:
                self._complete_wave()

    @property
    def _last_wave(self) -> int:
        """Of what is complete only when the step ends: tied to another pipeline rank's."""
        return len(self._stages)

    def _complete_in(self) -> dict[int, int]:
        """By parameter: the backward reaches the last stage of a rank first, so its gradients are complete in wave 0. One used in two
        stages waits for the earlier one, those tied to another rank's wait for the end."""
        waves = {
            id(parameter): len(self._stages) - 1 - index
            for index, stage in reversed(list(enumerate(self._stages)))
            for parameter in stage
        }
        tied = {id(entry.parameter) for entry in self._trained if len(entry.spec.pp_replicas) > 1}
        ids = [id(entry.parameter) for entry in self._trained]
        return {key: self._last_wave if key in tied else waves.get(key, self._last_wave) for key in ids}

    def _complete_wave(self) -> None:
        """All gradients of the next wave are there. The same order of waves on all ranks."""
        self._partial.reduce(self._sums, self._wave)
        self._start_reducing(self._wave)
        self._wave += 1

    def _start_reducing(self, wave: int) -> None:  # noqa: B027 - what is not started is reduced at the end
        """Begin to sum the gradients of a wave over the data-parallel ranks."""

    def local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """What has been added up for a parameter, before `reduce`; None where nothing has arrived. On this rank alone, or where
        micro-batches are reduced at once over the data-parallel ranks and of those elements that this rank keeps."""
        return self._sums[parameter]

    def gradient_tensors(self) -> list[Tensor]:
        """All that this rank holds of gradients at the moment; several may share their memory. Local."""
        arrived = [entry.parameter.grad for entry in self._trained if entry.parameter.grad is not None]
        return [*arrived, *self._sums.present()]

    def optimizer_tensors(self) -> list[Tensor]:
        """All that this rank keeps of the optimizer's state and of master weights, which may be those of parameters. Local."""
        shards = self.optimizer_shards()
        return [value for shard in shards for value in shard.values.values() if isinstance(value, Tensor)]

    def reduce(self, scale: float | Tensor) -> None:
        """Make the local gradients those of the whole batch. Called once, inside the scope, by all ranks.

        Partial tensor-parallel gradients and those of tied copies are summed, then all are summed over the
        data-parallel ranks and multiplied by `scale`. A rank that has no gradient for a parameter counts as zero; a
        parameter that no rank has a gradient for is left as it is by `step`.

        Args:
            scale: a number or a tensor of shape () on the parameters' device; the same on all ranks.
        """
        if self._reduced:
            raise RuntimeError("The gradients of this step are reduced already.")
        self._sums.absorb()
        while self._wave < self._last_wave:
            self._complete_wave()
        self._partial.reduce(self._sums, self._last_wave)
        self._partial.reduce_tied(self._sums)
        self._reduce_data_parallel(scale)
        self._reduced = True

    def grad_norm(self) -> float:
        """Euclidean norm of the whole model's gradient before clipping, the same on every rank.

        One all-reduce at the first call in a step, which all ranks make.
        """
        if self._norm is None:
            self._norm = self._global_norm()
        return self._norm

    def clip(self, *, max_norm: float | None = None, value: float | None = None) -> None:
        """Scale the gradients down to a global norm of at most `max_norm`, or clamp each element to [-value, value]."""
        if max_norm is not None:
            coefficient = clip_coefficient(self.grad_norm(), max_norm)
            if coefficient != 1.0:
                scale_(list(self._gradients()), coefficient)
        if value is not None:
            for gradient in self._gradients():
                gradient.clamp_(-value, value)

    def discard(self) -> None:
        """In the place of `step`: drop the reduced gradients. Weights and the optimizer's state stay as they are. Local."""
        self._sums.clear()

    def reduced_gradients(self) -> Iterator[Tensor]:
        """What the optimizer of this rank would step with, after `reduce`. Local."""
        return self._gradients()

    @abstractmethod
    def step(self) -> None:
        """Run the optimizer on the reduced gradients and bring the new weights to all ranks that use them."""

    @abstractmethod
    def refresh_master_weights(self) -> None:
        """Take over values that were written into the module's parameters from outside, as by a checkpoint. Local."""

    def optimizer_shards(self, *, to_save: bool = False) -> list[OptimizerShard]:
        """What this rank's optimizer keeps of each trained parameter, for checkpoints: views; after `teardown` copies
        in host memory. Local.

        Args:
            to_save: master weights are what the next step will go on from, also where a callback has written into parameters since the
                last one; these are copies then.
        """
        return self._shards(to_save) if self._ended is None else self._ended

    @abstractmethod
    def create_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor | float]]) -> None:
        """Make the optimizer's state as it would be after some steps, for a checkpoint to be read into. Local.

        Args:
            state: by parameter name and key: numbers and tensors of shape () that belong to the whole parameter, which are taken
                over, and tensors with a value for each element (on meta), for which zeros of this rank's shape are made.
        """

    def teardown(self) -> None:
        """Let go of the module, the optimizer and all process groups. Local; may be called twice."""
        if self._ended is None:
            self._ended = [shard.to_host() for shard in self._shards(to_save=True)]
        self._sums.clear()
        self._release()
        self._trained, self._others, self._stages, self._waves = [], [], (), {}
        self._sums, self._partial = GradientSums(()), PartialSums(self._mesh, ())

    @property
    def _group(self) -> dist.ProcessGroup:
        """The data-parallel ranks."""
        return self._mesh.group(*DATA_AXES)

    @property
    def _data_ranks(self) -> int:
        """Number of them."""
        return self._mesh.size("dp") * self._mesh.size("cp")

    @property
    def _expert_group(self) -> dist.ProcessGroup:
        """The ranks of this stage that have the same experts, where these are dealt over expert-parallel ranks."""
        return self._mesh.expert_data_group if self._mesh.layout.ep > 1 else self._group

    @property
    def _norm_group(self) -> dist.ProcessGroup | None:
        """The ranks that together count every element of a gradient that is whole on each data-parallel rank."""
        return self._mesh.group("tp", "cp", "pp") if self._mesh.layout.ep == 1 else dist.group.WORLD

    def _counts(self, entry: Trained) -> bool:
        """Whether this rank adds the whole gradient of a parameter to the global norm."""
        mesh = self._mesh
        if entry.spec.expert:
            return mesh.rank == mesh.expert_data_ranks[0]
        first = mesh.index("cp") == 0 and (mesh.layout.ep == 1 or mesh.index("dp") == 0)
        return first and entry.spec.counts_in_norm(mesh.index("tp"), mesh.index("pp"))

    def _alone(self) -> list[nn.Parameter]:
        """Parameters that are reduced in collectives of their own, where the order of a sum matters: above two ranks.

        Those that another pipeline stage holds a copy of, and those whose size differs between tensor-parallel ranks, which come
        last in every buffer: what lies before them has the same place on all ranks that hold a copy of it.
        """
        if self._data_ranks <= 2:
            return []
        return [e.parameter for e in self._trained if len(e.spec.pp_replicas) > 1 or self._uneven(e)]

    def _uneven(self, entry: Trained) -> bool:
        return entry.spec.is_uneven(self._mesh.size("tp"))

    def _check(self, optimizer: Optimizer) -> None:
        check_dtypes(self._trained, self._precision)
        check_optimizer(optimizer, cut=any(entry.spec.is_cut for entry in self._trained))
        check_place(optimizer, offloaded=self._zero.offload != NONE)

    @abstractmethod
    def _install(self, optimizer: Optimizer) -> None:
        """Build what `reduce` and `step` need."""

    def _begin_step(self) -> None:
        """Forget all gradients."""
        self._sums.clear()

    @abstractmethod
    def _shards(self, to_save: bool = False) -> list[OptimizerShard]:
        """See `optimizer_shards`; empty before `prepare`."""

    @abstractmethod
    def _release(self) -> None:
        """Drop what `_install` built."""

    @abstractmethod
    def _reduce_data_parallel(self, scale: float | Tensor) -> None:
        """Sum the gradients over the data-parallel ranks and multiply them by `scale`."""

    @abstractmethod
    def _global_norm(self) -> float:
        """Norm of the reduced gradients of the whole model: one all-reduce."""

    @abstractmethod
    def _gradients(self) -> Iterator[Tensor]:
        """The reduced gradients that this rank's optimizer steps with."""


def follow_writes(master: Tensor, written: Tensor) -> None:
    """Take over the elements of a parameter that are not what its float32 master weights round to: something else wrote them.

    Values are compared, piece by piece, as writes through `parameter.data`, which averages of weights use, leave no other trace.
    """
    flat = (master, written.detach()) if master.ndim else (master.view(1), written.detach().view(1))
    piece = _PIECE if master.device == written.device else _PIECE_FROM_DEVICE
    rows = max(1, piece * len(flat[0]) // max(1, master.numel()))
    for kept, value in zip(*(tensor.split(rows) for tensor in flat), strict=True):
        here = value.to(kept.device)
        followed = with_writes(kept, here)
        if followed is not kept:
            kept.copy_(followed)


def with_writes(master: Tensor, written: Tensor) -> Tensor:
    """What `follow_writes` would make of the master weights: these themselves where nothing else wrote."""
    here = written.detach().to(master.device)
    rounded = master.to(here.dtype)
    return master if torch.equal(rounded, here) else torch.where(rounded == here, master, here.to(master.dtype))


_PIECE, _PIECE_FROM_DEVICE = 2**18, 2**24
"""Elements that are compared at a time: few enough for a processor's cache, or for the memory of the host."""


def scale_(gradients: Sequence[Tensor], scale: float | Tensor) -> None:
    """Multiply in place."""
    if gradients:
        torch._foreach_mul_(list(gradients), scale)


def new_state(
    template: Tensor | float, like: Tensor, whole: Sequence[int], group: Mapping[str, object]
) -> Tensor | float:
    """One state of `like`, a trained tensor that is a part of a parameter of shape `whole`.

    Args:
        template: see `create_optimizer_state`.
        group: the optimizer's parameter group; capturable and fused optimizers want their step count on the device.
    """
    if not isinstance(template, Tensor):
        return template
    if not template.is_meta:
        return template.to(like.device if group.get("capturable") or group.get("fused") else "cpu")
    shape = like.shape if tuple(template.shape) == tuple(whole) else template.shape
    dtype = like.dtype if template.is_floating_point() else template.dtype
    return torch.zeros(shape, dtype=dtype, device=like.device)


def _trained(module: nn.Module, optimizer: Optimizer, specs: Mapping[str, ShardSpec]) -> list[Trained]:
    """The parameters that `optimizer` trains, in the order of their names, the same on all ranks of a stage."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    trained = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            name = names.get(id(parameter))
            if name is None:
                raise ConfigError(
                    f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the module."
                    " Build it from the module's own parameters, in configure_optimizers."
                )
            if name not in specs:
                raise ConfigError(
                    f"The parameter '{name}' was added to the module after it was cut for this layout. Add everything that is trained, all"
                    " adapters too, before the first fit, or save a checkpoint, build the module anew and load it with ckpt_path=."
                )
            trained.append(Trained(name, parameter, specs[name]))
    return sorted(trained, key=lambda entry: entry.name)


def check_dtypes(trained: Iterable[Trained], precision: str) -> None:
    """Refuse parameters whose type this precision does not train exactly."""
    for name, parameter in ((entry.name, entry.parameter) for entry in trained):
        if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ConfigError(
                f"The parameter '{name}' is {parameter.dtype}; float32, float64 and bfloat16 can be trained."
            )
        if parameter.dtype == torch.bfloat16 and precision != "bf16":
            raise ConfigError(
                f"The parameter '{name}' is bfloat16 but the precision is {precision}. Use precision bf16-true."
            )


def check_optimizer(optimizer: Optimizer, *, cut: bool) -> None:
    """Refuse optimizers that cannot be exact: with a closure, or, where tensors are cut, with a view of whole ones."""
    name = type(optimizer).__name__
    if name == "LBFGS":
        raise ConfigError(
            "LBFGS calls the loss several times in a step, which a pipeline cannot do. Use AdamW, Adam or SGD."
        )
    if cut and name in WHOLE_TENSOR_OPTIMIZERS:
        raise ConfigError(
            f"{name} computes its update from whole weight matrices, but this layout cuts them. Use an element-wise"
            " optimizer such as AdamW, or a layout with tp1 and zero_stage=0."
        )


def state_tensors(optimizer: Optimizer | None) -> list[Tensor]:
    """All tensors that an optimizer keeps."""
    states = optimizer.state.values() if optimizer is not None else ()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


WHOLE_TENSOR_OPTIMIZERS = ("Adafactor", "Muon", "LAMB", "Lamb", "LARS", "Shampoo", "SOAP")
"""Optimizers whose update of an element depends on other elements of its tensor."""
