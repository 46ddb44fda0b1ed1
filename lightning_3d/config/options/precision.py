"""The number formats of a run by name, and what is refused of them. Pure: no torch."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

from lightning_3d.errors import ConfigError, did_you_mean, listed

PRECISIONS = {"fp32": "32-true", "fp64": "64-true", "bf16": "bf16-true", "bf16_mixed": "bf16-mixed", "fp8": "bf16-true"}
"""`precision.name` and what Lightning calls it. With fp8 the strategy has `fp8=True` beside bf16-true."""

FP8_CAPABILITY = (8, 9)
"""The first compute capability with float8 matrix products: Ada. (CUDA C++ programming guide, "Compute Capabilities".)"""


def precision_of(lightning: str, *, fp8: bool = False) -> str:
    """What the rest of this package calls a precision of Lightning's; with float8 layers everything else is that of "bf16".

    Raises:
        ConfigError: it is not supported, or `fp8` is asked for beside another than bf16-true.
    """
    names = {value: name for name, value in PRECISIONS.items() if name != "fp8"}
    if lightning not in names:
        raise unknown_precision(lightning)
    if fp8 and lightning != "bf16-true":
        raise ConfigError(
            f'fp8=True is for Trainer(precision="bf16-true"), not {lightning!r}: linear layers of blocks multiply in float8, everything'
            " else is bf16 with float32 master weights."
        )
    return names[lightning]


def unknown_precision(name: str) -> ConfigError:
    """Refuses a name that is not in `PRECISIONS`, Lightning's names too."""
    if name.startswith(("fp16", "16", "float16", "half")):
        return ConfigError(
            f"precision={name} is not supported: float16 needs a loss scale, and an overflow on one stage or data rank would have to be"
            ' known on all of them before a step. Use precision=bf16, in a script Trainer(precision="bf16-true"): it has the range of'
            " float32."
        )
    lightning = listed(dict.fromkeys(PRECISIONS.values()), last="or")
    return ConfigError(
        f'There is no precision "{name}".{did_you_mean(name, PRECISIONS)} It must be auto, {listed(PRECISIONS, last="or")}; in a script'
        f" Trainer(precision=...) must be {lightning}."
    )


def fp8_refused(why: str) -> ConfigError:
    """Refuses float8 where hardware or libraries lack it."""
    return ConfigError(f"precision=fp8 {why}. Use precision=bf16.")


def check_fp8_device(device: str, capability: tuple[int, int] | None) -> None:
    """Refuse devices without float8 matrix products.

    Args:
        device: "gpu" or "cuda", or another. capability: of the GPU; None when it is not known.
    """
    if device not in ("gpu", "cuda"):
        raise fp8_refused(f"needs NVIDIA GPUs, but this run is on the {device.upper()}")
    if capability is not None and capability < FP8_CAPABILITY:
        least, found = (".".join(map(str, numbers)) for numbers in (FP8_CAPABILITY, capability))
        raise fp8_refused(f"needs GPUs of compute capability {least} or higher, such as H100; those of this machine have {found}")


def check_fp8_library() -> None:
    """Refuse where torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise fp8_refused("needs torchao, which is not installed: pip install lightning-3d[fp8]")


def listed_capability() -> tuple[int, int] | None:
    """The highest compute capability of this machine's GPUs, asked of the driver's tool; None when it does not say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.split()
        return max((int(major), int(minor)) for major, minor in (line.split(".") for line in lines))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
