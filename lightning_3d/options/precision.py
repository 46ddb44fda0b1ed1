"""Names of precisions and their checks. Pure: no torch."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

from lightning_3d.errors import ConfigError, did_you_mean, install, listed

PRECISIONS = {
    "fp32": "32-true",
    "fp64": "64-true",
    "bf16": "bf16-true",
    "bf16_mixed": "bf16-mixed",
    "fp8": "bf16-true",
}
"""`precision.name` and Lightning's name for it. For fp8 the strategy also gets `fp8=True`."""

FP8_CAPABILITY = (8, 9)
"""The first compute capability with float8 matrix products: Ada. (CUDA C++ programming guide,
"Compute Capabilities".)"""


FLOAT32_MATMUL = ("highest", "high", "medium")
"""Arguments of `torch.set_float32_matmul_precision`, the most exact first."""


def check_float32_matmul(option: str, name: object) -> None:
    """Refuse what is neither in `FLOAT32_MATMUL` nor None.

    Raises:
        ConfigError: with the option and its value.
    """
    if name is not None and name not in FLOAT32_MATMUL:
        hint = did_you_mean(str(name), FLOAT32_MATMUL)
        raise ConfigError(
            f"{option} must be {listed(FLOAT32_MATMUL, last='or')}, or null; got {name!r}.{hint}"
        )


def multiplies_in_tf32(name: str | None) -> bool:
    """Return whether GPUs multiply float32 matrices in TF32; without a name, torch's own setting is
    highest, which does not."""
    return name in FLOAT32_MATMUL[1:]


def precision_of(lightning: str, *, fp8: bool = False) -> str:
    """Return this package's name of a precision of Lightning's. With float8 layers it is "bf16",
    the precision of everything else.

    Raises:
        ConfigError: an unsupported precision, or `fp8` with another precision than bf16-true.
    """
    names = {value: name for name, value in PRECISIONS.items() if name != "fp8"}
    if lightning not in names:
        raise unknown_precision(lightning)
    if fp8 and lightning != "bf16-true":
        raise ConfigError(
            f'fp8=True needs Trainer(precision="bf16-true"); got {lightning!r}. Only the linear'
            " layers of blocks multiply in float8; everything else uses bf16 with float32 master"
            " weights."
        )
    return names[lightning]


def unknown_precision(name: str) -> ConfigError:
    """Return the error for a name that is not in `PRECISIONS`, also for Lightning's names."""
    if name.startswith(("fp16", "16", "float16", "half")):
        return ConfigError(
            f"precision={name} is not supported, because float16 needs a loss scale. Use"
            " precision=bf16, which has the range of float32 and needs none. In a script, use"
            ' Trainer(precision="bf16-true").'
        )
    lightning = listed(dict.fromkeys(PRECISIONS.values()), last="or")
    return ConfigError(
        f'There is no precision "{name}".{did_you_mean(name, PRECISIONS)} Use auto,'
        f" {listed(PRECISIONS, last='or')}. In a script, Trainer(precision=...) must be"
        f" {lightning}."
    )


def fp8_refused(why: str) -> ConfigError:
    """Return the error for float8 on hardware or libraries without it."""
    return ConfigError(f"precision=fp8 {why}. Use precision=bf16.")


def check_fp8_device(device: str, capability: tuple[int, int] | None) -> None:
    """Refuse devices without float8 matrix products.

    Args:
        device: kind of device; "gpu" and "cuda" may have them.
        capability: compute capability of the GPU; None when it is not known.
    """
    if device not in ("gpu", "cuda"):
        raise fp8_refused(f"needs NVIDIA GPUs, but this run is on the {device.upper()}")
    if capability is not None and capability < FP8_CAPABILITY:
        least, found = (".".join(map(str, numbers)) for numbers in (FP8_CAPABILITY, capability))
        raise fp8_refused(
            f"needs GPUs of compute capability {least} or higher, such as H100; the GPUs of this"
            f" machine have {found}"
        )


def check_fp8_library() -> None:
    """Refuse float8 if torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"precision=fp8 needs the package torchao. {install('fp8')}, or use precision=bf16."
        )


def listed_capability() -> tuple[int, int] | None:
    """Ask nvidia-smi for the highest compute capability of this machine's GPUs; None when it does
    not say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        lines = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=5
        ).stdout.split()
        return max((int(major), int(minor)) for major, minor in (line.split(".") for line in lines))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
