"""Answers of the planner about a run: what fits and what is fastest. Imports no torch.

`plan_run` takes `PlannerAdvice`, so that the checks of a configuration work without a planner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

from lightning_3d.app.config.cluster import ClusterConfig
from lightning_3d.app.config.objective import DISTILLATION, REQUIRED
from lightning_3d.app.config.optimizer import MUON
from lightning_3d.app.config.run_config import CompleteRun, ParallelismConfig, RunConfig
from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.choices import Fixed, has_options
from lightning_3d.app.planner.constants import OURS, compiled, efficiency_of
from lightning_3d.app.planner.fitting_stages import fitting_job
from lightning_3d.app.planner.host_memory import available_memory
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Machine
from lightning_3d.app.planner.memory import memory_of, memory_of_all
from lightning_3d.app.planner.memory_risk import fit_probability, largest_share
from lightning_3d.app.planner.profile_file import (
    Profile,
    machine_of_profile,
    read_profile,
    require_same_gpu,
    stack_of_profile,
)
from lightning_3d.app.planner.rank_memory import RankMemory
from lightning_3d.app.planner.search import Candidate, SearchResult, search
from lightning_3d.app.planner.stack import Stack
from lightning_3d.app.planner.step_time import step_of
from lightning_3d.app.planner.tables import memory_table
from lightning_3d.errors import ConfigError, LayoutError, plural
from lightning_3d.layout.given_stages import AUTO, listed_stages
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.shard_size import require_possible
from lightning_3d.models.families import FAMILIES
from lightning_3d.options.blocks import RECOMPUTE
from lightning_3d.options.optimizer import few_bits_moment
from lightning_3d.options.precision import FLOAT32_MATMUL, check_float32_matmul, multiplies_in_tf32
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.ranks.progress import task
from lightning_3d.storage.numbers import gibibytes, gpu_memory

# precision: (bytes of a weight, bytes of its optimizer state, precision of matrix products)
_BYTES = {
    "bf16": (2.0, 12.0, "bf16"),
    "fp8": (2.0, 12.0, "fp8"),
    "bf16_mixed": (4.0, 8.0, "bf16"),
    "fp32": (4.0, 8.0, "fp32"),
    "fp64": (8.0, 16.0, "fp32"),
}
_MASTER = {"bf16_mixed": 4.0, "fp32": 4.0}
"""By precision, the bytes of the copy of a float32 weight that ZeRO's optimizer steps
(`DeepSpeedStepper`)."""
_MOMENT = dict.fromkeys(_BYTES, 4.0) | {"fp64": 8.0}
"""By precision, the bytes of one momentum of a parameter, and of its average."""
_ROOTS = 2
"""Temporary tensors of torch's AdamW that is not fused, as on CPUs: the root of the squared
average, and this root without its bias."""
_LESS = 0.9
"""Share of the predicted memory that a run needs at most that is proposed after one that ran out of
memory."""

_LATENCY = 3e-6
"""Seconds of a message, for clusters that do not state it."""


def planned_accelerator(run: RunConfig) -> str:
    """Return the accelerator that the planner plans for: cpu or gpu."""
    return (
        "cpu"
        if run.cluster.accelerator == "cpu"
        or (run.profile and profile_of(run.profile).device == "cpu")
        else "gpu"
    )


@lru_cache(maxsize=4)
def profile_of(path: str) -> Profile:
    """Read the profile in a file.

    Raises:
        ConfigError: no such file, or a damaged one.
    """
    return read_profile(Path(path))


def machine_of_run(run: RunConfig) -> Machine | None:
    """Return the machine of a run, as `machine_of` does.

    Raises:
        ConfigError: also `trainer.float32_matmul_precision` that torch does not have.
    """
    matmul = run.trainer.float32_matmul_precision
    check_float32_matmul("trainer.float32_matmul_precision", matmul)
    return machine_of(run.cluster, run.profile, matmul)


def machine_of(
    cluster: ClusterConfig, profile: str | None = None, matmul: str | None = None
) -> Machine | None:
    """Convert a cluster to a machine; None if neither it nor a profile states the rates of its
    GPUs.

    Args:
        matmul: `trainer.float32_matmul_precision`.

    Raises:
        ConfigError: a profile that cannot be read, or that was measured on other hardware.
    """
    stated = _stated(cluster, matmul)
    if profile is None:
        return stated
    measured = profile_of(profile)
    require_same_gpu(measured, cluster.gpu, cluster.accelerator)
    if (
        cluster.gpus_per_node
        and measured.device == "cpu"
        and cluster.gpus_per_node != measured.ranks_per_node
    ):
        raise ConfigError(
            f"profile={profile} was measured with {plural(measured.ranks_per_node, 'CPU rank')} per"
            f" node, but the cluster has {cluster.gpus_per_node} per node. Measure again with"
            f" lightning-3d profile --ranks {cluster.gpus_per_node}."
        )
    given = cluster.inter_node.bandwidth if measured.link("between") is None else None
    if stated is None and cluster.nodes > 1 and measured.link("between") is None and given is None:
        raise ConfigError(
            f"profile={profile} was measured on one node, and the bandwidth between the"
            f" {cluster.nodes} nodes of {cluster.name} is unknown. Profile two nodes with torchrun,"
            " or set +cluster.inter_node.bandwidth=10e9 (bytes per second)."
        )
    machine = machine_of_profile(measured, stated, nodes=cluster.nodes)
    if stated is not None:
        return machine
    if given is not None:
        machine = replace(
            machine, network=given, network_latency=cluster.inter_node.latency or _LATENCY
        )
    return _with_pods(
        replace(machine, gpus_per_node=cluster.gpus_per_node or machine.gpus_per_node), cluster
    )


def _with_pods(machine: Machine, cluster: ClusterConfig) -> Machine:
    """Add the pods of a cluster, if it has several."""
    if (
        cluster.pod_nodes is None
        or cluster.pod_oversubscription is None
        or cluster.pod_nodes >= cluster.nodes
    ):
        return machine
    gpus = cluster.pod_nodes * machine.gpus // cluster.nodes
    return replace(
        machine,
        pod_gpus=max(gpus, machine.gpus_per_node),
        oversubscription=cluster.pod_oversubscription,
    )


def _stated(cluster: ClusterConfig, matmul: str | None) -> Machine | None:
    """Convert the rates that the cluster states; None if it does not state those of its GPUs."""
    rates = cluster.peak_flops
    known = (
        cluster.gpus_per_node,
        cluster.memory,
        cluster.memory_bandwidth,
        rates.bf16,
        cluster.intra_node.bandwidth,
    )
    if any(value is None for value in known) or (
        cluster.nodes > 1 and cluster.inter_node.bandwidth is None
    ):
        return None
    assert (
        cluster.gpus_per_node
        and cluster.memory
        and cluster.memory_bandwidth
        and rates.bf16
        and cluster.intra_node.bandwidth
    )
    groups = _linked_groups(cluster.nodes, cluster.gpus_per_node, cluster.nvlink_gpus or 1)
    machine = Machine(
        gpu=cluster.gpu or cluster.name,
        nodes=groups,
        # GPUs that fast links connect count as one node
        gpus_per_node=cluster.nodes * cluster.gpus_per_node // groups,
        memory=cluster.memory,
        bandwidth=cluster.memory_bandwidth,
        peak=rates.bf16,
        peak8=rates.fp8 or rates.bf16,
        peak32=(multiplies_in_tf32(matmul) and rates.tf32)
        or rates.fp32
        or rates.tf32
        or rates.bf16,
        link=cluster.intra_node.bandwidth,
        network=cluster.inter_node.bandwidth or cluster.intra_node.bandwidth,
        link_latency=cluster.intra_node.latency or _LATENCY,
        network_latency=cluster.inter_node.latency or _LATENCY,
        efficiency=efficiency_of(cluster.gpu or cluster.name),
    )
    return _with_pods(machine, cluster)


def _linked_groups(nodes: int, gpus_per_node: int, linked: int) -> int:
    """Return the number of groups of GPUs that fast links connect: as few as have at most `linked`
    GPUs and equally many nodes each."""
    most = max(linked // gpus_per_node, 1)
    return next(
        groups for groups in range(1, nodes + 1) if nodes % groups == 0 and nodes // groups <= most
    )


def job_of(
    run: CompleteRun,
    precision: str,
    layout: Layout | None = None,
    schedule: str = "1F1B",
    micro_batch: int = 1,
) -> Job:
    """Return the job of a run whose batch is complete.

    Raises:
        ConfigError: an unknown model family.
    """
    parallelism = run.parallelism
    weight, _, kind = _BYTES[precision]
    second = run.second
    offload = parallelism.zero_offload != "none"
    recompute = "full" if parallelism.offload_activations else parallelism.recompute or "none"
    on_gpus = planned_accelerator(run) == "gpu"
    return Job(
        model=Architecture.from_spec(run.spec),
        layout=layout or Layout(),
        seq=run.data["sequence_length"],
        global_batch=run.data["global_batch_size"],
        micro_batch=micro_batch,
        schedule=schedule,
        zero=1 if parallelism.zero_stage is None else parallelism.zero_stage,
        precision=kind,
        weight_bytes=weight,
        state_bytes=0.0 if offload else _state_bytes(run, precision),
        master_bytes=0.0 if offload else _MASTER.get(precision, 0.0),
        saved_block_bytes=_MOMENT[precision] if run.optimizer.get("name") == MUON else 0.0,
        autocast=precision == "bf16_mixed",
        trained=0.02 if run.lora.r else 1.0,
        reduce=parallelism.zero_reduce,
        gather=parallelism.zero_gather,
        recompute=recompute,
        recompute_every=parallelism.recompute_every,
        sequence_parallel=(
            on_gpus if parallelism.sequence_parallel is None else parallelism.sequence_parallel
        ),
        reduce_scatter=(
            on_gpus if parallelism.zero_reduce_scatter is None else parallelism.zero_reduce_scatter
        ),
        shard_size=parallelism.zero_shard_size,
        overlap_gather=parallelism.zero_overlap_gather,
        loss_chunks=parallelism.loss_chunks,
        blocks=_given_blocks(parallelism.stages) if layout is not None else None,
        stack=stack_of(run, precision),
        calls=1 if second is None else len(run.objective.batch_keys) // 2,
        frozen=(
            Architecture.from_spec(second)
            if second is not None and second.shapes is not None
            else None
        ),
        frozen_bytes=weight,
    )


def _state_bytes(run: CompleteRun, precision: str) -> float:
    """Return the bytes that the optimizer keeps for a parameter, with the average of the
    weights."""
    moment, few_bits = _MOMENT[precision], few_bits_moment(run.optimizer)
    states = _BYTES[precision][1] - (0.0 if few_bits is None else 2 * (moment - few_bits))
    return states + (moment if run.trainer.average_decay is not None else 0.0)


def _given_blocks(stages: Any) -> tuple[int, ...] | None:
    return tuple(given) if (given := listed_stages(stages)) is not None else None


def stack_of(run: CompleteRun, precision: str) -> Stack:
    """Describe this package as the run uses it.

    Raises:
        ConfigError: a profile that was measured in another precision.
    """
    stack = OURS if run.profile is None else _measured_stack(run, run.profile, precision)
    if run.model.get("attn_implementation") == "eager":
        stack = replace(stack, flash=False)
    if _BYTES[precision][2] == "fp32":
        stack = replace(stack, attention_precision="fp32")
    if run.parallelism.compile:
        stack = compiled(stack)
    if (
        planned_accelerator(run) == "cpu"
        and run.optimizer.get("name") == "adamw"
        and not run.optimizer.get("fused")
    ):
        stack = replace(
            stack, footprint=replace(stack.footprint, stepping=_ROOTS * _MOMENT[precision])
        )
    return stack


def _measured_stack(run: CompleteRun, path: str, precision: str) -> Stack:
    machine, profile = machine_of_run(run), profile_of(path)
    assert machine is not None
    if not profile.has_only_links and profile.precision != (
        kind := precision if precision in ("fp32", "fp64") else "bf16"
    ):
        raise ConfigError(
            f"profile={path} was measured in {profile.precision}, but the run uses {precision}."
            f" Measure again with precision={kind}."
        )
    matmul = run.trainer.float32_matmul_precision or FLOAT32_MATMUL[0]
    if profile.precision == "fp32" and profile.float32_matmul != matmul:
        raise ConfigError(
            f"profile={path} was measured with"
            f" trainer.float32_matmul_precision={profile.float32_matmul}, but the run uses"
            f" {matmul}. Measure again with trainer.float32_matmul_precision={matmul}."
        )
    return stack_of_profile(profile, machine, OURS)


@dataclass(frozen=True)
class PlannerAdvice:
    """Answers to the questions of `plan_run`."""

    def choose(self, run: CompleteRun, precision: str) -> dict[str, Any]:
        """Choose values for the keys of `parallelism` that `parallelism=auto` leaves open.

        Raises:
            ConfigError: unknown GPUs, an unknown model family, or stages, which a layout must be
                named for.
            LayoutError: nothing fits.
        """
        best = plan(run, precision).best[0].job
        return {
            "layout": best.layout.name,
            "order": list(best.layout.order),
            "schedule": best.schedule,
            "vp": best.layout.vp,
            "zero_stage": best.zero,
            "zero_shard_size": best.shard_size,
            "recompute": best.recompute,
            "sequence_parallel": best.sequence_parallel if best.layout.tp > 1 else None,
            "micro_batch_size": best.micro_batch,
            **(
                {"stages": best.blocks and list(best.blocks)}
                if run.parallelism.stages == AUTO
                else {}
            ),
            # Both are refused where nothing is recomputed.
            **({"recompute_every": 1, "recompute_keep": None} if best.recompute == "none" else {}),
        }

    def stages(
        self, run: CompleteRun, precision: str, layout: Layout, schedule: str, micro_batch: int
    ) -> list[int] | None:
        """Choose the number of blocks of each stage: where stages of equal work do not fit on the
        cluster's GPUs, the fastest that fit.

        Returns:
            None to balance stages by FLOPs and parameters: they fit, no stages fit, or the GPUs or
                the model family are unknown.
        """
        machine = machine_of_run(run)
        if machine is None or run.spec.shapes is None or layout.pp == 1:
            return None
        job = job_of(run, precision, layout, schedule, micro_batch)
        for share in (largest_share(run.plan.memory_risk), 1.0):
            if (fitting := fitting_job(job, share * machine.memory)) is not None:
                return list(fitting.blocks) if fitting.blocks is not None else None
        return None

    def refuse(
        self, run: CompleteRun, precision: str, layout: Layout, schedule: str, micro_batch: int
    ) -> tuple[str, ...]:
        """Refuse a layout that does not fit on the cluster's GPUs, where these and the model family
        are known.

        Returns:
            Warnings about a layout that fits but is more likely to run out of memory than proposals
            may be, or whose tp or cp spans nodes.

        Raises:
            LayoutError: with a table of the memory, and options that would fit.
        """
        machine = machine_of_run(run)
        if machine is None or run.spec.shapes is None:
            return ()
        job, risk = job_of(run, precision, layout, schedule, micro_batch), run.plan.memory_risk
        memory = memory_of(job)
        if memory.total > machine.memory:
            raise LayoutError(_too_large(job, memory, machine, risk))
        tight = (
            (_tight(job, memory, machine, risk),)
            if memory.total > largest_share(risk) * machine.memory
            else ()
        )
        return (*uncounted(run), *tight, *spanning(job, machine))

    def refuse_here(
        self,
        run: CompleteRun,
        precision: str,
        layout: Layout,
        schedule: str,
        micro_batch: int,
        ranks: int,
    ) -> None:
        """Refuse a run whose `ranks` ranks on the cores of this machine need more than its memory.

        An unknown model family passes, and so does a machine whose memory is unknown.

        Raises:
            LayoutError: with a table of the memory, and options that would fit.
        """
        there = available_memory()
        if there is None or run.spec.shapes is None:
            return
        # ranks that communicate through gloo keep whole sequences
        if run.parallelism.sequence_parallel is None:
            run = replace(run, parallelism=replace(run.parallelism, sequence_parallel=False))
        job = job_of(run, precision, layout, schedule, micro_batch)
        # Host memory has no allocator reserves, but it holds what is offloaded.
        footprint, states = (
            replace(job.stack.footprint, context=0.0, allocator=1.0),
            _state_bytes(run, precision),
        )
        stack = replace(job.stack, footprint=footprint)
        job = replace(
            job, state_bytes=states, master_bytes=_MASTER.get(precision, 0.0), stack=stack
        )
        share = ranks / layout.world_size

        def needed(one: Job) -> float:
            return share * memory_of_all(one).total

        if needed(job) <= there:
            return
        advice = (
            _nearest(job, lambda one: needed(one) if needed(one) <= there else None)
            or "Use a smaller model or more machines"
        )
        parts = {name: share * size for name, size in asdict(memory_of_all(job)).items()}
        raise LayoutError(
            f"{layout.name} needs about {gibibytes(needed(job))} for its {plural(ranks, 'rank')} on"
            f" this machine, but only {gibibytes(there)} is"
            f" free.\n{memory_table(RankMemory(**parts))}\n{advice}, or use GPUs"
            " (cluster=h100_1x8). Use force=true to start anyway."
        )


def uncounted(run: CompleteRun) -> tuple[str, ...]:
    """Return a warning about a second model whose folder is not known, or of an unknown family."""
    if run.objective.name == DISTILLATION and run.objective.teacher == REQUIRED:
        return (
            (
                "The memory and time of the teacher are not counted, because no folder on this"
                " machine has its sizes (objective.teacher)."
            ),
        )
    if run.second is None or run.second.shapes is not None:
        return ()
    return (
        (
            f"The planner does not know the model family '{run.second.model_type}' of the frozen"
            f" {run.objective.second_model}, so it does not count its memory and time. lightning-3d"
            " dryrun measures them."
        ),
    )


def measured_otherwise(run: CompleteRun) -> tuple[str, ...]:
    """Return a warning about a profile with sequences that are more than twice as long or as short
    as those of the run."""
    measured, planned = (
        profile_of(run.profile).sequence if run.profile is not None else None,
        run.data["sequence_length"],
    )
    if measured is None or planned / 2 <= measured <= planned * 2:
        return ()
    return (
        (
            f"The profile was measured with sequences of {measured} tokens, and the plan is for"
            f" {planned}, so its times are less certain. Measure again with lightning-3d profile"
            f" data.sequence_length={planned} ..."
        ),
    )


_WORTH_A_WARNING = 0.002
"""Share of a step."""


def spanning(job: Job, machine: Machine) -> tuple[str, ...]:
    """Return a warning for tp and for cp if their ranks are on several nodes, with the seconds of a
    step that this is predicted to cost."""
    axes = [axis for axis in ("tp", "cp") if machine.group(job.layout, (axis,)).nodes > 1]
    if not axes:
        return ()
    # the same GPUs, all joined by fast links
    nearer = replace(machine, nodes=1, gpus_per_node=machine.gpus)
    whole = step_of(job, machine, pipeline="estimate").seconds
    lost = whole - step_of(job, nearer, pipeline="estimate").seconds
    if lost < _WORTH_A_WARNING * whole:  # the ring attention of long sequences hides its messages
        return ()
    names = {"tp": "tensor", "cp": "context"}
    return tuple(
        f"The {job.layout.size(axis)} {names[axis]}-parallel ranks of {job.layout.name} are on"
        f" {machine.group(job.layout, (axis,)).nodes} nodes. Communication between nodes is"
        f" predicted to cost {lost:.3g} s of each step of {whole:.3g} s. Use at most"
        f" {machine.gpus_per_node} ranks for tp and cp together."
        for axis in axes
    )


def need_less(
    run: CompleteRun, precision: str, layout: Layout, schedule: str, micro_batch: int
) -> str | None:
    """Describe the predicted memory of a run that ran out of memory, and the nearest options that
    need less; None for an unknown family."""
    if run.spec.shapes is None:
        return None
    job = job_of(run, precision, layout, schedule, micro_batch)
    memory = memory_of(job)

    def smaller(one: Job) -> float | None:
        total = memory_of(one).total
        return total if total <= _LESS * memory.total else None

    advice = _nearest(job, smaller) or "Use more GPUs or a larger tp or pp"
    return (
        f"The planner predicts {gibibytes(memory.total)} for the fullest rank of"
        f" {layout.name}:\n{memory_table(memory)}\n{advice}."
    )


def plan(run: CompleteRun, precision: str, *, most: int = 5) -> SearchResult:
    """Search the fastest ways to train on the cluster, with the keys that the configuration fixes.

    Args:
        run: the run.
        precision: name in `PRECISIONS`.
        most: layouts to return.

    Raises:
        ConfigError: unknown GPUs, an unknown model family, or stages, which a layout must be named
            for.
        LayoutError: nothing fits.
    """
    if listed_stages(run.parallelism.stages) is not None:
        raise ConfigError(
            "stages belongs to one layout, but here the planner chooses the layout. Name a layout"
            " in train or dryrun, omit stages, or use stages=auto."
        )
    machine = machine_of_run(run)
    if run.parallelism.zero_shard_size is not None:
        require_possible(
            run.parallelism.zero_shard_size,
            run.parallelism.zero_stage,
            machine.gpus if machine is not None else None,
        )
    if machine is None:
        raise _unknown(run)
    if run.spec.shapes is None:
        raise ConfigError(
            f"The planner does not know the model family '{run.spec.model_type}'. Use one of the"
            f" known families: {', '.join(sorted(FAMILIES))}."
        )
    job, fixed = job_of(run, precision), _fixed(run)
    with task(f"searching layouts for {plural(machine.gpus, machine.unit)}"):
        found = search(
            job,
            machine,
            fixed=fixed,
            most=most,
            room=largest_share(run.plan.memory_risk) * machine.memory,
        )
    if not found.best:
        raise LayoutError(_nothing_fits(run, job, machine, _chunked(run, precision)))
    return found


def _unknown(run: CompleteRun) -> ConfigError:
    """Return the error for a cluster without known rates."""
    if planned_accelerator(run) == "cpu":
        return ConfigError(
            f"The planner cannot plan for the cluster {run.cluster.name}, because the rates of its"
            " CPU cores are unknown. Measure them with lightning-3d profile and set"
            " profile=profile.json."
        )
    return ConfigError(
        f"The planner cannot plan for the cluster {run.cluster.name}, because its GPUs are unknown."
        " Use a cluster such as cluster=h100_4x8, or measure this machine with lightning-3d"
        " profile and set profile=profile.json."
    )


def _nothing_fits(run: CompleteRun, job: Job, machine: Machine, chunked: Job | None) -> str:
    """Return the message about a job for which no layout fits.

    Args:
        chunked: the same with a loss in chunks, if it can have one.
    """
    fixed, risk = _fixed(run), run.plan.memory_risk
    size = f"{job.model.parameters / 1e9:.1f} billion parameters"
    tight = search(job, machine, fixed=fixed, most=1).best if risk < 0.5 else ()
    leaner = (
        search(
            chunked, machine, fixed=fixed, most=1, room=largest_share(risk) * machine.memory
        ).best
        if chunked is not None
        else ()
    )
    waiting = (
        f" Its pipelines may wait for at most {fixed.max_bubble:.1%} of a step (plan.max_bubble)."
        if fixed.max_bubble < 1
        else ""
    )
    return (
        f"No layout of a model with {size} fits on {plural(machine.gpus, machine.unit)} with"
        f" {gpu_memory(machine.memory)} each. The run has sequences of {job.seq} tokens and a"
        " global batch of"
        f" {job.global_batch}.{waiting}{_in_chunks(leaner)}{_at_more_risk(tight, machine, risk)}"
        f" Use more {machine.unit}s, shorter sequences, or a data.global_batch_size with more"
        " divisors."
    )


def _fixed(run: CompleteRun) -> Fixed:
    """Return the keys that the configuration fixes."""
    parallelism = run.parallelism
    options = _zero_options(parallelism)
    if parallelism.layout != "auto":
        return Fixed(
            max_bubble=run.plan.max_bubble,
            fit_stages=parallelism.stages == AUTO,
            zero_options=options,
        )
    return Fixed(
        schedule=parallelism.schedule,
        micro_batch=parallelism.micro_batch_size,
        zero=parallelism.zero_stage,
        recompute=parallelism.recompute,
        sequence_parallel=parallelism.sequence_parallel,
        order=tuple(parallelism.order) if parallelism.order is not None else None,
        max_bubble=run.plan.max_bubble,
        fit_stages=parallelism.stages == AUTO,
        zero_options=options,
    )


def _zero_options(parallelism: ParallelismConfig) -> ZeroOptions:
    """Return the options of ZeRO that the configuration has.

    Raises:
        LayoutError: no stage has them, or not the one that is given.
    """
    given = parallelism.zero_stage if parallelism.layout == "auto" else None
    tried = [
        replace(ZeroOptions.of(parallelism), stage=stage)
        for stage in ((3, 2, 1) if given is None else (given,))
    ]
    for options in tried:
        try:
            options.resolve("1F1B", 1)
        except LayoutError as error:
            refused = error
        else:
            return options
    raise refused


_WORTH_OVERLAPPING = 0.01
"""Least share of a step that gathering parameters during the next forward must save."""

_WORTH_ANOTHER_SEARCH = 0.02
"""Least share of a step that compiled blocks and a loss in chunks must save, and also a loss in
chunks alone."""

_LARGE_LOSS = 0.05
"""Least share of a GPU that the loss of a proposed layout takes where it is worth while to search
for layouts with a loss in chunks."""


def faster_compiled(run: CompleteRun, precision: str, first: Candidate) -> Candidate | None:
    """Search once more, with compiled blocks and a loss in chunks.

    Args:
        first: the fastest without them.

    Returns:
        The fastest, or None: on CPU, with a profile (which measured blocks that are not compiled),
            if the run compiles already, or if it
        saves little.
    """
    if run.profile is not None or run.parallelism.compile or planned_accelerator(run) == "cpu":
        return None
    return _faster_than(first, fused(job_of(run, precision)), run)


def faster_chunked(run: CompleteRun, precision: str, first: Candidate) -> Candidate | None:
    """Search once more, with a loss in chunks alone: layouts fit that need too much memory with
    whole logits.

    Args:
        first: the fastest without it.

    Returns:
        The fastest, or None: if the run has a loss in chunks already or a second model, which reads
            whole logits, if the loss of `first`
        takes little memory, or if it saves little.
    """
    job, machine = _chunked(run, precision), machine_of_run(run)
    if job is None or machine is None or first.memory.loss < _LARGE_LOSS * machine.memory:
        return None
    return _faster_than(first, job, run)


def _chunked(run: CompleteRun, precision: str) -> Job | None:
    """Return the job of a run with a loss in chunks; None if it has one already, or cannot."""
    return (
        None
        if run.parallelism.loss_chunks != 1 or run.second is not None
        else job_of(run, precision).but(loss_chunks=AUTO)
    )


def _faster_than(first: Candidate, job: Job, run: CompleteRun) -> Candidate | None:
    """Return the fastest way to run a job, if it saves enough compared with `first`."""
    machine = machine_of_run(run)
    if machine is None:
        return None
    room, below = (
        largest_share(run.plan.memory_risk) * machine.memory,
        (1 - _WORTH_ANOTHER_SEARCH) * first.step.seconds,
    )
    found = search(job, machine, fixed=_fixed(run), most=1, room=room, below=below).best
    return found[0] if found and found[0].step.seconds < below else None


def faster_overlapped(run: CompleteRun, found: SearchResult) -> Candidate | None:
    """Return the fastest of the proposed layouts if parameters are gathered while the next forward
    runs (`zero_overlap_gather`).

    Args:
        found: what a search without this option has found.

    Returns:
        None if the run has the option or one that excludes it, or if it saves little.
    """
    machine = machine_of_run(run)
    options = replace(_fixed(run).zero_options, overlap_gather=True)
    tried = [
        one.job.but(overlap_gather=True)
        for one in found.best
        if has_options(replace(options, stage=one.job.zero), one.job)
    ]
    if machine is None or run.parallelism.zero_overlap_gather or not tried:
        return None
    one = min(
        (Candidate(job, step_of(job, machine), memory_of(job)) for job in tried),
        key=lambda one: one.step.seconds,
    )
    return one if one.step.seconds < (1 - _WORTH_OVERLAPPING) * found.best[0].step.seconds else None


def _in_chunks(leaner: Sequence[Candidate]) -> str:
    """Describe what would fit with a loss in chunks."""
    if not leaner:
        return ""
    return (
        f" With parallelism.loss_chunks={AUTO}, {leaner[0].job.layout.name} fits"
        f" ({gibibytes(leaner[0].memory.total)})."
    )


def _at_more_risk(tight: Sequence[Candidate], machine: Machine, risk: float) -> str:
    """Describe what would fit at a higher risk."""
    if not tight:
        return ""
    predicted = tight[0].memory.total
    needed = ceil(100 * (1 - fit_probability(predicted, machine.memory))) / 100
    return (
        f" Layouts may run out of memory with a probability of at most {risk:.1%}"
        f" (plan.memory_risk={risk:g}), but {tight[0].job.layout.name} would fill"
        f" {predicted / machine.memory:.0%} of a {machine.unit}. To allow it, set"
        f" plan.memory_risk={needed:g}."
    )


def _nearest_with_room(job: Job, machine: Machine, risk: float) -> str:
    """Return options with which the same layout is unlikely to run out of memory."""
    room = largest_share(risk) * machine.memory
    if job.layout.pp > 1 and job.blocks is None and (fitting := fitting_job(job, room)) is not None:
        return f"Use parallelism.stages=auto ({gibibytes(memory_of(fitting).total)})"
    leaner = [replace(job, loss_chunks=AUTO), fused(job)] if job.loss_chunks == 1 else [fused(job)]
    nearest = _nearest(
        job, lambda one: total if (total := memory_of(one).total) <= room else None, leaner
    )
    return nearest or f"Use more {machine.unit}s or a larger tp or pp"


def _tight(job: Job, memory: RankMemory, machine: Machine, risk: float) -> str:
    """Return the warning about a layout that fits but is too likely to run out of memory."""
    advice = _nearest_with_room(job, machine, risk)
    return (
        f"{job.layout.name} is predicted to fill {memory.total / machine.memory:.0%} of"
        f" {gibibytes(machine.memory)} on its fullest rank. That leaves"
        f" {gibibytes(machine.memory - memory.total)}, and it fits with a probability of"
        f" {fit_probability(memory.total, machine.memory):.0%}; proposals fit with at least"
        f" {1 - risk:.0%} (plan.memory_risk). {advice}."
    )


def _too_large(job: Job, memory: RankMemory, machine: Machine, risk: float) -> str:
    """Return the message about a layout that does not fit, with the nearest options that do."""
    advice = _nearest_with_room(job, machine, risk)
    return (
        f"{job.layout.name} needs about {gibibytes(memory.total)} on its fullest rank, but"
        f" {machine.gpu} has {gpu_memory(machine.memory)}.\n{memory_table(memory)}\n{advice}, or"
        " use parallelism=auto to let the planner choose. Use force=true to start anyway."
    )


def _nearest(
    job: Job, fits: Callable[[Job], float | None], leaner: Sequence[Job] = ()
) -> str | None:
    """Find keys of `parallelism` that make the same layout fit, fewest changes first; None if there
    are none.

    Args:
        job: the job that does not fit.
        fits: function from a job to the bytes that it needs, or None if it does not fit.
        leaner: the same job with options that cost no time, tried before more recomputation.
    """
    levels = RECOMPUTE[RECOMPUTE.index(job.recompute) :]
    tries = [replace(one, zero=zero) for one in (job, *leaner) for zero in range(job.zero, 4)]
    tries += [
        replace(job, zero=zero, recompute=recompute)
        for recompute in levels[1:]
        for zero in range(job.zero, 4)
    ]
    tries += [replace(one, micro_batch=1) for one in tries if job.micro_batch > 1]
    for one in tries:
        if (total := fits(one)) is not None:
            before, after = _keys(job), _keys(one)
            words = [
                f"parallelism.{key}={value}" for key, value in after.items() if value != before[key]
            ]
            return f"Use {' '.join(words)} ({gibibytes(total)})"
    return None


def _keys(job: Job) -> dict[str, Any]:
    """Return the keys of `parallelism` that `_nearest` changes, with their values."""
    return {
        "zero_stage": job.zero,
        "recompute": job.recompute,
        "micro_batch_size": job.micro_batch,
        "loss_chunks": job.loss_chunks,
        "compile": str(job.stack.compiled).lower(),
    }


def fused(job: Job) -> Job:
    """Return the same job with compiled blocks and a loss in chunks, which need less memory and
    time on GPUs."""
    return replace(
        job,
        loss_chunks=AUTO if job.loss_chunks == 1 else job.loss_chunks,
        stack=compiled(job.stack),
    )
