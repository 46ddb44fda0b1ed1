"""From a run's configuration to the planner, and back: what fits, what is fastest. Imports no torch.

`plan_run` takes `Advice`, so that the checks of a configuration work without a planner, and the planner knows no configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import floor
from pathlib import Path
from typing import Any

from lightning_3d.config.cluster import ClusterConfig
from lightning_3d.config.options.blocks import RECOMPUTE
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout.layout import Layout
from lightning_3d.models.families import FAMILIES, read_spec
from lightning_3d.planner.architecture import Architecture
from lightning_3d.planner.constants import OURS, efficiency_of
from lightning_3d.planner.host_memory import available_memory
from lightning_3d.planner.job import Job, Stack
from lightning_3d.planner.machine import Machine
from lightning_3d.planner.memory import Memory, memory_of, memory_of_all
from lightning_3d.planner.profile_file import Profile, machine_of_profile, read_profile, require_same_gpu, stack_of_profile
from lightning_3d.planner.search import Candidate, Fixed, Found, search
from lightning_3d.planner.tables import margin, memory_table
from lightning_3d.storage.numbers import gigabytes

_BYTES = {  # precision: (of a weight, of the optimizer's state of it, of a product)
    "bf16": (2.0, 12.0, "bf16"),
    "fp8": (2.0, 12.0, "fp8"),
    "bf16_mixed": (6.0, 8.0, "bf16"),  # the weights in float32 and, until the backward, in 16 bits
    "fp32": (4.0, 8.0, "fp32"),
    "fp64": (8.0, 16.0, "fp32"),
}
_LATENCY = 3e-6
"""Seconds of a message, where the cluster does not say."""


def planned_accelerator(run: Any) -> str:
    """cpu or gpu: what the planner plans for."""
    return "cpu" if run.cluster.accelerator == "cpu" or (run.profile and profile_of(run.profile).device == "cpu") else "gpu"


@lru_cache(maxsize=4)
def profile_of(path: str) -> Profile:
    """The profile in a file.

    Raises:
        ConfigError: there is none, or it is broken.
    """
    return read_profile(Path(path))


def machine_of(cluster: ClusterConfig, profile: str | None = None) -> Machine | None:
    """The cluster as the planner takes it; None where neither it nor a profile says what its GPUs can do.

    Raises:
        ConfigError: a profile that cannot be read, or of another type of GPU.
    """
    stated = _stated(cluster)
    if profile is None:
        return stated
    measured = profile_of(profile)
    require_same_gpu(measured, cluster.gpu, cluster.accelerator)
    if cluster.gpus_per_node and measured.device == "cpu" and cluster.gpus_per_node != measured.ranks_per_node:
        raise ConfigError(
            f"profile={profile} was measured with {measured.ranks_per_node} ranks that share the cores of a machine, but the cluster has"
            f" {cluster.gpus_per_node}. Use lightning-3d profile --ranks {cluster.gpus_per_node}."
        )
    if stated is None and cluster.nodes > 1 and measured.link("between") is None:
        raise ConfigError(
            f"profile={profile} was measured on one node, and {cluster.name} does not say what lies between its {cluster.nodes} nodes."
            " Profile two nodes with torchrun, or give cluster.inter_node.bandwidth."
        )
    machine = machine_of_profile(measured, stated, nodes=cluster.nodes)
    return machine if stated is not None or not cluster.gpus_per_node else replace(machine, gpus_per_node=cluster.gpus_per_node)


def _stated(cluster: ClusterConfig) -> Machine | None:
    """What the cluster says; None where it does not say what its GPUs can do."""
    rates = cluster.peak_flops
    known = (cluster.gpus_per_node, cluster.memory, cluster.memory_bandwidth, rates.bf16, cluster.intra_node.bandwidth)
    if any(value is None for value in known) or (cluster.nodes > 1 and cluster.inter_node.bandwidth is None):
        return None
    assert cluster.gpus_per_node and cluster.memory and cluster.memory_bandwidth and rates.bf16 and cluster.intra_node.bandwidth
    together = max(cluster.gpus_per_node, min(cluster.nvlink_gpus or 1, cluster.nodes * cluster.gpus_per_node))
    return Machine(
        gpu=cluster.gpu or cluster.name,
        nodes=cluster.nodes * cluster.gpus_per_node // together,
        gpus_per_node=together,  # what fast links connect counts as a node
        memory=cluster.memory,
        bandwidth=cluster.memory_bandwidth,
        peak=rates.bf16,
        peak8=rates.fp8 or rates.bf16,
        peak32=rates.tf32 or rates.fp32 or rates.bf16,
        link=cluster.intra_node.bandwidth,
        network=cluster.inter_node.bandwidth or cluster.intra_node.bandwidth,
        link_latency=cluster.intra_node.latency or _LATENCY,
        network_latency=cluster.inter_node.latency or _LATENCY,
        efficiency=efficiency_of(cluster.gpu or cluster.name),
    )


def job_of(run: Any, precision: str, layout: Layout | None = None, schedule: str = "1F1B", micro_batch: int = 1) -> Job:
    """The job of a `RunConfig`, whose model and batch are complete.

    Raises:
        ConfigError: a family whose parameters are not known here.
    """
    parallelism = run.parallelism
    weight, state, kind = _BYTES[precision]
    offload = parallelism.zero_offload != "none"
    recompute = "full" if parallelism.offload_activations else parallelism.recompute or "none"
    return Job(
        model=Architecture.from_spec(read_spec(run.model["config"])),
        layout=layout or Layout(),
        seq=run.data["sequence_length"],
        global_batch=run.data["global_batch_size"],
        micro_batch=micro_batch,
        schedule=schedule,
        zero=1 if parallelism.zero_stage is None else parallelism.zero_stage,
        precision=kind,
        weight_bytes=weight,
        state_bytes=0.0 if offload else state,
        trained=0.02 if (run.model.get("lora") or {}).get("r") else 1.0,
        reduce=parallelism.zero_reduce,
        gather=parallelism.zero_gather,
        recompute=recompute,
        recompute_every=parallelism.recompute_every,
        sequence_parallel=parallelism.sequence_parallel is not False,
        stack=stack_of(run, precision),
    )


def stack_of(run: Any, precision: str) -> Stack:
    """This package as the run uses it.

    Raises:
        ConfigError: the profile was measured in another precision.
    """
    changes: dict[str, Any] = {}
    if run.model.get("attn_implementation") == "eager":
        changes["flash"] = False
    if run.parallelism.compile:
        changes["traffic"] = 1.2  # as software whose element-wise operations are fused
    if run.profile is None:
        return replace(OURS, **changes)
    machine, profile = machine_of(run.cluster, run.profile), profile_of(run.profile)
    assert machine is not None
    if profile.precision != (kind := precision if precision in ("fp32", "fp64") else "bf16"):
        raise ConfigError(
            f"profile={run.profile} was measured in {profile.precision}, but the run is in {precision}. Profile with precision={kind}."
        )
    return replace(stack_of_profile(profile, machine, OURS), **changes)


@dataclass(frozen=True)
class Advice:
    """What `plan_run` asks."""

    def choose(self, run: Any, precision: str) -> dict[str, Any]:
        """Values for the keys of `parallelism` that are open with `parallelism=auto`.

        Raises:
            ConfigError: nothing is known of the cluster's GPUs or of the model's parameters. LayoutError: nothing fits.
        """
        best = plan(run, precision).best[0].job
        return {
            "layout": best.layout.name,
            "order": list(best.layout.order),
            "schedule": best.schedule,
            "vp": best.layout.vp,
            "zero_stage": best.zero,
            "recompute": best.recompute,
            "sequence_parallel": best.sequence_parallel if best.layout.tp > 1 else None,
            "micro_batch_size": best.micro_batch,
        }

    def refuse(self, run: Any, precision: str, layout: Layout, schedule: str, micro_batch: int) -> tuple[str, ...]:
        """Refuse what does not fit on the cluster's GPUs, where these and the model's parameters are known.

        Returns:
            Warnings: what fits, but uses the reserve that proposals leave free.

        Raises:
            LayoutError: with a table of what needs how much, and what would fit.
        """
        machine = machine_of(run.cluster, run.profile)
        if machine is None or read_spec(run.model["config"]).shapes is None:
            return ()
        job, reserve = job_of(run, precision, layout, schedule, micro_batch), run.plan.memory_reserve
        memory = memory_of(job)
        if memory.total > machine.memory:
            raise LayoutError(_too_large(job, memory, machine, reserve))
        return (_tight(job, memory, machine, reserve),) if memory.total > (1 - reserve) * machine.memory else ()

    def refuse_here(self, run: Any, precision: str, layout: Layout, schedule: str, micro_batch: int, ranks: int) -> None:
        """Refuse what the memory of this machine cannot hold, with `ranks` of the run on its cores. A model whose parameters are not known
        is let pass, and so is a machine that does not say what memory it has.

        Raises:
            LayoutError: with a table of what needs how much, and what would fit.
        """
        there = available_memory()
        if there is None or read_spec(run.model["config"]).shapes is None:
            return
        job = job_of(run, precision, layout, schedule, micro_batch)
        # Host memory has no reserves, no copies of gradients, and what is offloaded to it is in it.
        stack = replace(job.stack, context=0.0, overhead=1.0, spare_gradient_bytes=0.0)
        job = replace(job, state_bytes=_BYTES[precision][1], stack=stack)
        share = ranks / layout.world_size

        def needed(one: Job) -> float:
            return share * memory_of_all(one).total

        if needed(job) <= there:
            return
        advice = _nearest(job, lambda one: needed(one) if needed(one) <= there else None) or "Use a smaller model or more machines"
        parts = {name: share * size for name, size in asdict(memory_of_all(job)).items()}
        raise LayoutError(
            f"{layout.name} needs about {gigabytes(needed(job))} for its {ranks} ranks on this machine, of whose memory"
            f" {gigabytes(there)} are free.\n{memory_table(Memory(**parts))}\n{advice}, or GPUs (cluster=h100_1x8). force=true starts it"
            " nevertheless."
        )


def plan(run: Any, precision: str, *, most: int = 5) -> Found:
    """The fastest ways to train on the cluster, within what the configuration sets.

    Raises:
        ConfigError: nothing is known of the cluster's GPUs or of the model's parameters. LayoutError: nothing fits.
    """
    machine = machine_of(run.cluster, run.profile)
    if machine is None:
        raise ConfigError(
            f"The planner needs to know the GPUs of the cluster, but {run.cluster.name} does not say what they are. Name one by numbers,"
            " such as cluster=h100_4x8, or measure this machine with lightning-3d profile and give profile=profile.json."
        )
    if read_spec(run.model["config"]).shapes is None:
        raise ConfigError(
            f"The planner does not know the parameters of model_type '{run.model['config']['model_type']}'. Known families:"
            f" {', '.join(sorted(FAMILIES))}."
        )
    job = job_of(run, precision)
    parallelism = run.parallelism
    automatic = parallelism.layout == "auto"
    fixed = Fixed(
        schedule=parallelism.schedule if automatic else None,
        micro_batch=parallelism.micro_batch_size if automatic else None,
        zero=parallelism.zero_stage if automatic else None,
        recompute=parallelism.recompute if automatic else None,
        sequence_parallel=parallelism.sequence_parallel if automatic else None,
        order=tuple(parallelism.order) if automatic and parallelism.order is not None else None,
    )
    reserve = run.plan.memory_reserve
    found = search(job, machine, fixed=fixed, most=most, reserve=reserve)
    if not found.best:
        smallest = f"{job.model.parameters / 1e9:.1f} billion parameters on {machine.gpus} GPUs with {gigabytes(machine.memory)} each"
        tight = search(job, machine, fixed=fixed, most=1).best if reserve else ()
        raise LayoutError(
            f"No layout of {smallest} fits with sequences of {job.seq} tokens and a global batch of {job.global_batch}"
            f"{_without_reserve(tight, machine, reserve)}. Use more GPUs, or shorter sequences, or a global batch that more layouts divide."
        )
    return found


def _without_reserve(tight: Sequence[Candidate], machine: Machine, reserve: float) -> str:
    """What would fit if nothing were left free."""
    if not tight:
        return ""
    share = tight[0].memory.total / machine.memory
    return (
        f" and {reserve:.0%} of the memory left free (plan.memory_reserve={reserve:g}). {tight[0].job.layout.name} would fill {share:.0%},"
        f" which plan.memory_reserve={floor(100 * (1 - share)) / 100:g} allows; with less than 0.12 runs often run out of memory"
    )


def _room(machine: Machine, reserve: float) -> Callable[[Job], float | None]:
    """Of a job the bytes that it needs, None where they use the reserve."""
    return lambda one: total if (total := memory_of(one).total) <= (1 - reserve) * machine.memory else None


def _tight(job: Job, memory: Memory, machine: Machine, reserve: float) -> str:
    """The warning of a layout that fits and leaves too little free."""
    advice = _nearest(job, _room(machine, reserve)) or "Use more GPUs or a larger tp or pp"
    return (
        f"{job.layout.name} is predicted to fill {margin(memory, machine)}, on its fullest rank. That leaves less than the reserve of"
        f" {reserve:.0%} (plan.memory_reserve), where predictions are not safe: it may run out of memory. {advice}."
    )


def _too_large(job: Job, memory: Memory, machine: Machine, reserve: float) -> str:
    """Why it does not fit, in numbers, and the nearest that does."""
    advice = _nearest(job, _room(machine, reserve)) or "Use more GPUs or a larger tp or pp"
    return (
        f"{job.layout.name} needs about {gigabytes(memory.total)} on its fullest rank, but {machine.gpu} has {gigabytes(machine.memory)}.\n"
        f"{memory_table(memory)}\n{advice}, or parallelism=auto to let the planner choose. force=true starts it nevertheless."
    )


def _nearest(job: Job, fits: Callable[[Job], float | None]) -> str | None:
    """Keys of `parallelism` that make the same layout fit, with the fewest changes first; None where none do.

    Args:
        fits: bytes that a job needs, or None where there is no room for them.
    """
    levels = RECOMPUTE[RECOMPUTE.index(job.recompute) :]
    tries = [replace(job, zero=zero, recompute=recompute) for recompute in levels for zero in range(job.zero, 4)]
    tries += [replace(one, micro_batch=1) for one in tries if job.micro_batch > 1]
    changes = {"zero_stage": "zero", "recompute": "recompute", "micro_batch_size": "micro_batch"}
    for one in tries:
        if (total := fits(one)) is not None:
            words = [f"parallelism.{key}={getattr(one, name)}" for key, name in changes.items() if getattr(one, name) != getattr(job, name)]
            return f"Use {' '.join(words)} ({gigabytes(total)})"
    return None
