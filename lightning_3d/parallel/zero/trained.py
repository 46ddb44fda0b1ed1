"""The parameters that a rank trains: which ranks share them, in which order their gradients become
complete, and which parameters cannot be trained exactly."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.errors import ConfigError, listed
from lightning_3d.layout.layout import Layout
from lightning_3d.options.optimizer import (
    CPU_ADAM,
    SPARSE,
    WHOLE_TENSOR,
    closure_refusal,
    few_bits_refusal,
    has_few_bits,
    offload_refusal,
    sharding_refusal,
    sparse_refusal,
    stages_refusal,
)
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.trials.optimizers import (
    is_elementwise,
    needs_closure,
    steps_each_tensor_alone,
)
from lightning_3d.parallel.zero.gradients import sum_dtype

DATA_AXES = ("dp", "cp")
_PIECE = 2**24
"""Elements that are compared at a time."""
"""Ranks along these axes hold the same parameters and see different tokens: gradients are summed
over them."""


@dataclass(frozen=True)
class Trained:
    """A parameter that the optimizer trains on this rank."""

    name: str
    parameter: nn.Parameter
    spec: ShardSpec


class TrainedParameters:
    """The trained parameters of one rank.

    They are sorted by name, which is the same order on all ranks of a pipeline stage. Flat buffers
    have orders of their own: waves, groups of the optimizer, or units. Those whose
    size differs between tensor-parallel ranks come last: what lies before them has the same place
    on all ranks that hold a copy of it.

    Args:
        mesh: process groups.
        entries: the parameters, sorted by name.
        stages: for each pipeline stage of this rank all its parameters, in the order in which the
            forward uses them.
        device: device of the gradients.

    Attributes:
        first_copies: of gradients that several tensor-parallel ranks compute alike, the
            data-parallel ranks add up the first rank's only.
        waves: the waves of a step, in which gradients are complete.
        wave_of: by id of a parameter, the number of its wave.
    """

    waves: list[Wave]
    wave_of: dict[int, int]

    def __init__(
        self,
        mesh: Mesh,
        entries: Iterable[Trained],
        stages: Sequence[Sequence[nn.Parameter]],
        device: torch.device,
    ) -> None:
        self.mesh, self.stages, self.device = mesh, stages, device
        self.entries = sorted(entries, key=self.is_uneven)
        self.first_copies = False
        self.plan_waves(None)

    def plan_waves(self, early_bytes: int | None) -> None:
        """Number the waves.

        Args:
            early_bytes: gradients that may be sent together while a backward still runs; None: none
                are.
        """
        by_id = {id(entry.parameter): entry for entry in self.entries}
        self.waves = find_waves(
            self.stages,
            self.parameters,
            late=lambda parameter: len(by_id[id(parameter)].spec.pp_replicas) > 1,
            early=lambda parameter: self._may_be_early(by_id[id(parameter)]),
            early_bytes=early_bytes if dist.get_world_size(self.first_group) > 1 else None,
        )
        self.wave_of = {
            id(parameter): number
            for number, wave in enumerate(self.waves)
            for parameter in wave.parameters
        }

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [entry.parameter for entry in self.entries]

    @property
    def group(self) -> dist.ProcessGroup:
        """The data-parallel ranks."""
        return self.mesh.outside_blocks(self.mesh.group(*DATA_AXES))

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The data-parallel ranks that ZeRO shards over: all, or a group of neighbours."""
        return self.mesh.outside_blocks(self.mesh.shard_group)

    @property
    def in_two_levels(self) -> bool:
        """True if gradients are summed in the shard group first, and then each shard over its
        replicas.

        Where a buffer differs between tensor-parallel ranks so do the shards, and copies would not
        stay bit-equal. Gradients are then summed over all data-parallel ranks at once.
        """
        return self.mesh.replica_group is not None and not (self.order_matters and self.any_uneven)

    @property
    def first_group(self) -> dist.ProcessGroup:
        """The ranks over which gradients are summed first."""
        return self.shard_group if self.in_two_levels else self.group

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """The ranks of this stage that hold the same experts; without expert parallelism, the
        data-parallel ranks."""
        return self.mesh.expert_data_group if self.mesh.layout.ep > 1 else self.group

    @property
    def expert_shard_group(self) -> dist.ProcessGroup:
        """The ranks that ZeRO shards experts over: those of `expert_group` that are in one shard
        group."""
        return expert_shard_group(self.mesh)

    @property
    def first_expert_group(self) -> dist.ProcessGroup:
        """The ranks over which gradients of experts are summed first."""
        return self.expert_shard_group if self.in_two_levels else self.expert_group

    @property
    def last_wave(self) -> int:
        """The wave of gradients that are complete only at the end of the step: those of parameters
        tied to another pipeline rank's."""
        return len(self.waves) - 1

    def _may_be_early(self, entry: Trained) -> bool:
        """Return whether a gradient may be sent inside a backward: it is whole, and of one size and
        at one place on all ranks with a copy.

        Those of experts that ranks share out are not: a rank whose experts got no tokens would send
        them at another time.
        """
        spec = entry.spec
        return not self.summed_over_tp(entry) and not spec.expert and not self.is_uneven(entry)

    def takes_first_copy(self, entry: Trained) -> bool:
        """True if the gradient of the first tensor-parallel rank takes the place of those of the
        others, before it is reduced further."""
        return self.first_copies and is_copied(entry.spec) and len(entry.spec.tp_grad_sum) <= 1

    def summed_over_tp(self, entry: Trained) -> tuple[int, ...]:
        """Tensor-parallel coordinates over which a gradient is summed before the data-parallel
        ranks add it up; empty for none."""
        if self.takes_first_copy(entry):
            return entry.spec.tp_replicas
        return entry.spec.tp_grad_sum if len(entry.spec.tp_grad_sum) > 1 else ()

    def is_uneven(self, entry: Trained) -> bool:
        """True if the size of a parameter differs between tensor-parallel ranks."""
        return entry.spec.is_uneven(self.mesh.size("tp"))

    @property
    def any_uneven(self) -> bool:
        return any(self.is_uneven(entry) for entry in self.entries)

    @property
    def order_matters(self) -> bool:
        """True if a sum over the data-parallel ranks depends on its order: above two ranks."""
        return self.mesh.size("dp") * self.mesh.size("cp") > 2

    def reduced_alone(self) -> list[nn.Parameter]:
        """Parameters that are reduced in collectives of their own, so that copies on several ranks
        stay bit-equal.

        Those that another pipeline stage holds a copy of, and those of uneven size, where the order
        of a sum matters.
        """
        if not self.order_matters:
            return []
        return [
            e.parameter for e in self.entries if len(e.spec.pp_replicas) > 1 or self.is_uneven(e)
        ]

    def counts(self, entry: Trained) -> bool:
        """True if this rank adds a parameter's gradient, which every data-parallel rank has all of,
        to the global norm."""
        mesh = self.mesh
        if entry.spec.expert:
            return mesh.rank == mesh.expert_data_ranks[0]
        first = mesh.index("cp") == 0 and (mesh.layout.ep == 1 or mesh.index("dp") == 0)
        return first and entry.spec.counts_in_norm(mesh.index("tp"), mesh.index("pp"))


def expert_shard_group(mesh: Mesh) -> dist.ProcessGroup:
    """The ranks that ZeRO shards experts over; without expert parallelism, those that it shards
    everything over."""
    return mesh.expert_shard_group if mesh.layout.ep > 1 else mesh.shard_group


def find_trained(
    module: nn.Module, optimizer: Optimizer, specs: Mapping[str, ShardSpec]
) -> list[Trained]:
    """The parameters that `optimizer` trains, in the order of their names, the same on all ranks of
    a stage.

    Raises:
        ConfigError: the optimizer has parameters that are not in the module, or that were added
            after it was sharded.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    trained = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            name = names.get(id(parameter))
            if name is None:
                raise ConfigError(
                    f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not"
                    " in the module. Build the optimizer from the module's own parameters, in"
                    " configure_optimizers."
                )
            if name not in specs:
                raise ConfigError(
                    f"The parameter '{name}' was added to the module after it was sharded for this"
                    " layout. Add everything that is trained, including adapters, before the first"
                    " fit; or save a checkpoint, rebuild the module and load it with ckpt_path=."
                )
            trained.append(Trained(name, parameter, specs[name]))
    return sorted(trained, key=lambda entry: entry.name)


def names_in_order(
    trained: Iterable[Trained], parts: Iterable[Iterable[nn.Parameter]]
) -> list[str]:
    """Names of the trained parameters in an order of parameters. Without experts, of which each
    rank may have others."""
    names = {id(entry.parameter): entry.name for entry in trained if not entry.spec.expert}
    return [names[id(parameter)] for part in parts for parameter in part if id(parameter) in names]


def is_copied(spec: ShardSpec) -> bool:
    """Return whether several tensor-parallel ranks hold this very shard, and are no data-parallel
    ranks of each other."""
    return len(spec.tp_replicas) > 1 and not spec.expert


def ranks_along(mesh: Mesh, axis: str, indices: Sequence[int]) -> tuple[int, ...]:
    """Global ranks at these indices of one axis and at this rank's place on all others, rising."""
    return tuple(sorted(mesh.layout.rank(**{**mesh.coordinates, axis: index}) for index in indices))


@dataclass(frozen=True, eq=False)
class Wave:
    """Parameters whose gradients are sent together.

    Attributes:
        stage: index, among this rank's stages, of the one whose last backward completes them; None:
            the end of the step.
        parameters: the parameters; empty if nothing is trained there.
        is_early: whether they may be complete before that backward is over.
    """

    stage: int | None
    parameters: Sequence[nn.Parameter]
    is_early: bool = False


def find_waves(
    stages: Sequence[Sequence[nn.Parameter]],
    trained: Iterable[nn.Parameter],
    *,
    late: Callable[[nn.Parameter], bool],
    early: Callable[[nn.Parameter], bool],
    early_bytes: int | None,
) -> list[Wave]:
    """Number the waves of a rank.

    The backward reaches the last stage first. A parameter that two stages use is complete after the
    backward of the earlier one.

    Args:
        stages: for each stage its parameters, in the order in which the forward uses them.
        trained: parameters that are trained.
        late: whether a parameter is complete only at the end of the step.
        early: whether a parameter's gradient may be sent inside a backward.
        early_bytes: bytes of the gradients of one early wave, except for a single larger parameter.
            A stage with less than that has none. None: there are none.
    """
    trained = list(trained)
    at_end = {id(parameter): parameter for parameter in trained if late(parameter)}
    left = {id(parameter): parameter for parameter in trained if id(parameter) not in at_end}
    uses = Counter(key for stage in stages for key in {id(parameter) for parameter in stage})
    waves = []
    for stage in reversed(range(len(stages))):
        # A tied parameter is in the list twice, and complete when the backward has passed its first
        # use.
        members = list(
            {
                id(parameter): parameter for parameter in stages[stage] if id(parameter) in left
            }.values()
        )
        if any(uses[id(parameter)] > 1 for parameter in members):
            earlier = {id(parameter) for other in stages[:stage] for parameter in other}
            members = [parameter for parameter in members if id(parameter) not in earlier]
        chosen = [
            parameter for parameter in members if uses[id(parameter)] == 1 and early(parameter)
        ]
        found = [] if early_bytes is None else _full_buckets(reversed(chosen), early_bytes)
        sent = {id(parameter) for bucket in found for parameter in bucket}
        waves += [Wave(stage, bucket, is_early=True) for bucket in found]
        waves.append(Wave(stage, [parameter for parameter in members if id(parameter) not in sent]))
        for parameter in members:
            del left[id(parameter)]
    return [*waves, Wave(None, [*at_end.values(), *left.values()])]


def _full_buckets(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Split parameters into runs of at most `limit` bytes of gradients, each type apart, without
    the last run of each type."""
    full: list[list[nn.Parameter]] = []
    running: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        dtype = sum_dtype(parameter)
        run, size = running.get(dtype, ([], 0))
        added = parameter.numel() * dtype.itemsize
        if run and size + added > limit:
            full.append(run)
            run, size = [], 0
        running[dtype] = ([*run, parameter], size + added)
    return full


def require_same_order(names: Sequence[str], group: dist.ProcessGroup) -> None:
    """Refuse parameters whose order differs between the ranks of `group`: gradients of different
    ones would be added up. One small all-reduce in host memory.

    Raises:
        ConfigError: the orders differ.
    """
    own = _fingerprint(names)
    least_and_most = torch.tensor([own, -own])
    dist.all_reduce(least_and_most, dist.ReduceOp.MIN, group=group)
    if least_and_most.tolist() != [own, -own]:
        raise ConfigError(
            "The parameters of the model (with ZeRO, of its optimizer) have another order on other"
            " data-parallel ranks, so gradients of different parameters would be added up. Create"
            " layers and parameter groups in one fixed order: from a list, for example, not from a"
            " set."
        )


def _fingerprint(names: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7], "big")


class Writes:
    """What something other than the optimizer writes into parameters with master weights, a
    callback that clips weights for example.

    A version counter of torch counts what operations write into a parameter, and costs nothing to
    read. It does not count what is written through `parameter.data`, by a collective of
    torch.distributed, through NumPy or by a kernel that fuses an optimizer: whoever does that calls
    `refresh_master_weights` of the strategy afterwards. Where replicas are compared, `differs`
    finds such writes by their values.

    Args:
        parameters: the parameters. Writes until now are the optimizer's own.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(dict.fromkeys(parameters))
        self.ours()

    def ours(self) -> None:
        """Take note that all writes until now are the optimizer's own, or have been followed."""
        self._known = {parameter: parameter._version for parameter in self._parameters}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether something has written into a parameter since `ours`."""
        return parameter._version != self._known[parameter]


@torch.no_grad()
def merged(master: Tensor, written: Tensor) -> Tensor:
    """Return float32 master weights that round to a parameter: its own elements where they do not
    yet."""
    here = written.detach().to(master.device)
    return torch.where(master.to(here.dtype) == here, master, here.to(master.dtype))


@torch.no_grad()
def differs(master: Tensor, written: Tensor) -> Tensor:
    """Return whether master weights do not round to a parameter: bool, shape (), on the device of
    the master weights."""
    found = torch.zeros((), dtype=torch.bool, device=master.device)
    values = master.flatten().split(_PIECE)
    others = written.detach().flatten().split(_PIECE)
    for part, there in zip(values, others, strict=True):
        here = there.to(master.device)
        rounded = part.to(here.dtype)
        found |= ((rounded != here) & ~(rounded.isnan() & here.isnan())).any()
    return found


def with_writes(master: Tensor, written: Tensor) -> Tensor:
    """Return `merged`, or the master weights themselves if they round to the parameter already. The
    host waits for the answer."""
    return merged(master, written) if differs(master, written) else master


def check_dtypes(trained: Iterable[Trained], precision: str) -> None:
    """Refuse parameters whose type this precision does not train exactly."""
    for name, parameter in ((entry.name, entry.parameter) for entry in trained):
        if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ConfigError(
                f"The parameter '{name}' is {parameter.dtype}; only float32, float64 and bfloat16"
                " parameters can be trained."
            )
        if parameter.dtype == torch.bfloat16 and precision != "bf16":
            raise ConfigError(
                f"The parameter '{name}' is bfloat16 but the precision is {precision}. Use"
                " precision bf16-true."
            )


def check_optimizer(
    optimizer: Optimizer,
    trained: Sequence[Trained],
    stage: int,
    device: torch.device,
    layout: Layout,
) -> None:
    """Refuse an optimizer that needs a closure, sparse gradients, all tensors of a pipeline, or
    whole tensors of which ranks step parts. Warn of one that cannot be checked.

    Args:
        optimizer: the user's.
        trained: the parameters that it trains on this rank.
        stage: ZeRO stage.
        device: device of the parameters.
        layout: the layout, for messages.

    Raises:
        ConfigError: with the optimizers that work.
    """
    name = type(optimizer).__name__
    if needs_closure(optimizer):
        raise ConfigError(closure_refusal(name))
    if name in SPARSE:
        raise ConfigError(sparse_refusal(name))
    if getattr(optimizer, "shares_matrices", False):
        return  # its matrices are stepped as wholes, whatever parts ranks have
    by = [
        *(["this layout"] if any(entry.spec.is_cut for entry in trained) else []),
        *([f"zero_stage={stage}"] if stage > 0 else []),
    ]
    if has_few_bits(f"{type(optimizer).__module__}.{name}"):
        if by:
            raise ConfigError(few_bits_refusal(name, by[0], layout))
        return
    _check_stages(optimizer, device, layout)
    if not by:
        return
    elementwise = False if name in WHOLE_TENSOR else is_elementwise(optimizer, device)
    if elementwise is False:
        raise ConfigError(sharding_refusal(name, by[0]))
    if elementwise is None:
        rank_zero_warn(
            f"{name} could not step a small matrix, so it is unknown whether it may be sharded by"
            f" {by[0]}. The result is right only if it updates each element of a parameter by"
            " itself, as AdamW does."
        )


def _check_stages(optimizer: Optimizer, device: torch.device, layout: Layout) -> None:
    """Refuse an optimizer that needs all tensors, of which each stage of a pipeline has some. Warn
    of one that cannot be checked."""
    name = type(optimizer).__name__
    alone = layout.pp == 1 or steps_each_tensor_alone(optimizer, device)
    if alone is False:
        raise ConfigError(stages_refusal(name, f"pp{layout.pp}"))
    if alone is None:
        rank_zero_warn(
            f"{name} could not step two small matrices, so it is unknown whether pp{layout.pp} may"
            " train it. The result is right only if its update of a parameter depends on no other"
            " parameter."
        )


def check_zero(trained: Sequence[Trained], stage: int) -> None:
    """Refuse parameters that a ZeRO stage above 0 cannot train exactly."""
    unsharded = [
        f"{e.spec.name} {tuple(e.parameter.shape)}"
        for e in trained
        if not (e.parameter.ndim and e.parameter.numel())
    ]
    if unsharded:
        raise ConfigError(
            f"zero_stage={stage} cannot shard parameters that have no dimensions or no elements:"
            f" {listed(unsharded)}. Reshape single numbers to (1,), freeze them, or use"
            " zero_stage=0."
        )
    dtypes = {entry.parameter.dtype for entry in trained}
    if torch.float64 in dtypes:
        raise ConfigError(
            f"zero_stage={stage} cannot train float64 parameters: DeepSpeed's master weights are"
            " float32. Use zero_stage=0."
        )
    if len(dtypes) > 1:
        types = ", ".join(sorted(map(str, dtypes)))
        raise ConfigError(
            f"zero_stage={stage} needs trained parameters of one type; found {types}. Use"
            " zero_stage=0."
        )


GPU_ONLY = ("apex", "bitsandbytes", "transformer_engine")
"""Packages whose optimizers are GPU kernels."""

WORKS = "torch.optim.AdamW, best with fused=True, or deepspeed.ops.adam.DeepSpeedCPUAdam"


def check_place(optimizer: Optimizer, *, offloaded: bool) -> None:
    """Refuse an optimizer that cannot step weights where they are.

    Args:
        offloaded: the weights that it steps are in host memory, whatever device the parameters are
            on.
    """
    name = type(optimizer).__name__
    if name in ("DeepSpeedCPULion", "DeepSpeedCPUAdagrad"):
        raise ConfigError(f"{name} is not supported. Use {WORKS}.")
    if not offloaded:
        if name == CPU_ADAM:
            raise ConfigError(
                f"{name} updates weights in host memory, which needs zero_offload=optimizer and a"
                " zero_stage above 0. Set these, or use torch.optim.AdamW."
            )
        return
    if getattr(optimizer, "shares_matrices", False):
        raise ConfigError(offload_refusal())
    package = type(optimizer).__module__.partition(".")[0]
    if package in GPU_ONLY or (package == "deepspeed" and name.startswith("Fused")):
        raise ConfigError(
            f"{name} of {package} runs on GPUs only, but zero_offload updates weights in host"
            f" memory. Use {WORKS}, or zero_offload=none."
        )
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise ConfigError(
            f"{name} with capturable=True counts its steps on the GPU, but zero_offload updates"
            " weights in host memory. Remove capturable, or use zero_offload=none."
        )
