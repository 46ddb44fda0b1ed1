"""Check: environment variables that slow communication down or make it hang, and that differ
between ranks.

What the variables do: the environment variables of NCCL
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, which says of several that they
are for debugging and should not stay set), of ProcessGroupNCCL
(https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html) and of CUDA
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/, section "CUDA Environment Variables").
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from lightning_3d.app.doctor.check import Check, Facts, GatheredAnswers, Room
from lightning_3d.app.doctor.findings import OK, WARNING, WRONG, DoctorFinding, alike
from lightning_3d.ranks.supervisor import cores

_WATCHED = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|CUDA|PYTORCH_CUDA|PYTORCH_ALLOC|OMP|MKL|UCX|FI)_\w+|LD_PRELOAD"
)
_OF_ONE_RANK = ("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_HOSTID")
"""Variables that may differ between ranks."""


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def _is_set(value: str) -> bool:
    return bool(value.strip())


HARMFUL: tuple[tuple[str, Callable[[str], bool], str, str], ...] = (
    (
        "NCCL_P2P_DISABLE",
        _is_on,
        WRONG,
        "GPUs of a host copy through its memory instead of NVLink or PCIe",
    ),
    ("NCCL_SHM_DISABLE", _is_on, WRONG, "ranks of a host without a direct link use the network"),
    ("NCCL_IB_DISABLE", _is_on, WRONG, "hosts use TCP instead of InfiniBand or RoCE"),
    (
        "NCCL_NET_GDR_LEVEL",
        lambda value: value.strip().upper() in ("0", "LOC"),
        WARNING,
        "network adapters do not read GPU memory",
    ),
    (
        "NCCL_NVLS_ENABLE",
        lambda value: value.strip() == "0",
        WARNING,
        "all-reduces do not use the NVLink switch",
    ),
    (
        "NCCL_ALGO",
        _is_set,
        WARNING,
        "one algorithm is forced for all sizes and kinds of collectives",
    ),
    (
        "NCCL_PROTO",
        _is_set,
        WARNING,
        "one protocol is forced for all sizes; a wrong LL128 can corrupt data",
    ),
    ("NCCL_LAUNCH_MODE", _is_set, WARNING, "deprecated, and meant for processes with several GPUs"),
    (
        "NCCL_BLOCKING_WAIT",
        _is_on,
        WARNING,
        "the host waits for each collective (old name of TORCH_NCCL_BLOCKING_WAIT)",
    ),
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        _is_on,
        WARNING,
        "the host waits for each collective where only a stream should wait",
    ),
    (
        "NCCL_DEBUG",
        lambda value: value.strip().upper() in ("TRACE", "INFO"),
        WARNING,
        "NCCL prints much; TRACE also slows it down",
    ),
    (
        "NCCL_CHECKS_DISABLE",
        _is_on,
        WARNING,
        "NCCL does not check arguments, so that mistakes become hangs",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        _is_on,
        WRONG,
        "the host waits for each kernel, and pipelines can hang",
    ),
    (
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _is_on,
        WRONG,
        "each tensor is allocated by the driver, which waits for the GPU",
    ),
)
"""(variable, function that says whether its value hurts, verdict, what it does)"""


def measure(room: Room) -> Facts:
    """Return the variables of this rank that have to do with communication, and its number of
    cores."""
    return {"variables": watched(os.environ), "cores": cores(), "threads": _threads()}


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def watched(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have to do with communication."""
    return {name: value for name, value in sorted(environment.items()) if _WATCHED.fullmatch(name)}


def judge(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Name harmful variables, then those that differ."""
    places, variables = gathered.places, gathered.values("variables")
    findings = []
    for name, hurts, verdict, meaning in HARMFUL:
        ranks = tuple(rank for rank, own in variables.items() if name in own and hurts(own[name]))
        if ranks:
            words = f"{variables[ranks[0]][name]} on {places.describe(ranks)}: {meaning}"
            harmless = gathered.setup.accelerator == "cpu" or (
                name == "NCCL_IB_DISABLE" and len(places.hosts) == 1
            )
            advice = f"Unset {name}, unless you know that this machine needs it."
            findings.append(
                DoctorFinding(name, WARNING if harmless else verdict, words, ranks, advice)
            )
    for name in sorted({name for own in variables.values() for name in own} - {*_OF_ONE_RANK}):
        finding = alike(
            name,
            {rank: own.get(name, "unset") for rank, own in variables.items()},
            places,
            verdict=_verdict(name),
        )
        if finding.verdict != OK:
            findings.append(
                DoctorFinding(
                    name,
                    finding.verdict,
                    finding.measured,
                    finding.ranks,
                    f"Set {name} to one value on all ranks.",
                )
            )
    findings += _too_many_threads(gathered)
    count = len({name for own in variables.values() for name in own})
    return findings or [
        DoctorFinding(
            "variables", OK, f"{count} set that have to do with communication; none is harmful"
        )
    ]


def _verdict(name: str) -> str:
    """NCCL's ranks must agree on algorithms and transports, else they hang."""
    return WRONG if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG") else WARNING


def _too_many_threads(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Find hosts whose ranks together have more threads than two for each core."""
    findings = []
    for host, ranks in gathered.places.hosts.items():
        own = [rank for rank in ranks if rank in gathered.facts]
        threads = sum(int(gathered.facts[rank]["threads"]) for rank in own)
        there = max((int(gathered.facts[rank]["cores"]) for rank in own), default=1)
        if len(own) > 1 and threads > 2 * max(there, len(own)):
            best = max(1, there // len(own))
            words = f"{len(own)} ranks with {threads} threads on {there} cores of {host}"
            findings.append(
                DoctorFinding(
                    "OMP_NUM_THREADS", WARNING, words, tuple(own), f"Set OMP_NUM_THREADS={best}."
                )
            )
    return findings


CHECK = Check("environment", measure, judge)
