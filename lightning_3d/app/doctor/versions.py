"""Check: versions of what a run uses are alike on all ranks."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from lightning_3d.app.doctor import nvidia_smi
from lightning_3d.app.doctor.check import Check, Facts, GatheredAnswers, Room
from lightning_3d.app.doctor.findings import UNKNOWN, WARNING, WRONG, DoctorFinding, alike

_PACKAGES = ("lightning", "deepspeed", "transformers")
_OF_GPUS = ("cuda", "nccl", "driver")


def measure(room: Room) -> Facts:
    """Return the versions on this rank; None for what is not there."""
    import torch

    from lightning_3d.version import __version__

    facts: Facts = {
        "lightning_3d": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    facts |= {name: _quietly(lambda name=name: version(name)) for name in _PACKAGES}  # type: ignore[misc]
    facts["cuda"] = torch.version.cuda
    facts["nccl"] = (
        _quietly(lambda: ".".join(map(str, torch.cuda.nccl.version())))
        if torch.version.cuda
        else None
    )
    rows = nvidia_smi.gpus(("driver",)) if room.setup.accelerator == "gpu" else None
    facts["driver"] = rows[0]["driver"] if rows else None
    return facts


def _quietly(read: Callable[[], str]) -> str | None:
    try:
        return read()
    except (PackageNotFoundError, RuntimeError, AttributeError, OSError):
        return None


def judge(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Compare the versions of all ranks. Two drivers may differ: each host has its own, and NCCL
    does not compare them."""
    findings = []
    for name in ("lightning_3d", "python", "torch", *_PACKAGES, *_OF_GPUS):
        values = gathered.values(name)
        if gathered.setup.accelerator == "cpu" and name in _OF_GPUS:
            continue
        if name in _OF_GPUS and set(values.values()) == {None}:
            advice = (
                "Is nvidia-smi installed there?"
                if name == "driver"
                else "Install a build of torch for CUDA."
            )
            findings.append(DoctorFinding(name, UNKNOWN, "no rank can tell", advice=advice))
            continue
        verdict = WARNING if name in ("python", "driver") else WRONG
        findings.append(
            alike(
                name,
                values,
                gathered.places,
                verdict=verdict,
                advice=f"Use {name} {{usual}} on all hosts.",
            )
        )
    return findings


CHECK = Check("versions", measure, judge)
