"""The learning-rate schedule that `optimizer.scheduler` describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_3d.app.config.scheduler import HYDRA_KEYS, KEY, check_length
from lightning_3d.app.training.objects import find_class
from lightning_3d.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer


def make_scheduler(optimizer: Optimizer, config: Mapping[str, Any], total_steps: float) -> Any:
    """Build the schedule of an optimizer, which steps once in each optimizer step.

    Args:
        optimizer: the optimizer. Every parameter group has its own learning rate, which the
            schedule multiplies.
        config: `optimizer.scheduler`.
        total_steps: optimizer steps of the run, infinite if it has no end.

    Raises:
        ConfigError: the schedule does not fit into the run, or its class cannot be used.
    """
    from torch.optim.lr_scheduler import LambdaLR, LRScheduler

    if config.get("_target_") is None:
        return LambdaLR(optimizer, lr_factor(config, total_steps))
    target = config["_target_"]
    kind = find_class(KEY, target, (LRScheduler,))
    try:
        scheduler = kind(
            optimizer, **{key: value for key, value in config.items() if key not in HYDRA_KEYS}
        )
    except Exception as error:
        raise ConfigError(
            f"Cannot create {KEY} ({target}):"
            f" {next(iter(str(error).splitlines()), type(error).__name__)}"
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"{KEY}._target_={target} made a {type(scheduler).__name__}. It must make an"
            " LRScheduler of torch."
        )
    return scheduler


def lr_factor(config: Mapping[str, Any], total_steps: float) -> Callable[[int], float]:
    """Make the function from step 0, 1, ... to the multiple of the configured learning rate.

    Warm-up is linear and reaches 1 at its last step. What follows depends on the name:

    - constant: 1.
    - linear, cosine: a decay from 1 to `min_lr_ratio`, linearly or along half a cosine, until
      `decay_steps` (default: the end of the run).
    - wsd (arXiv:2404.06395, arXiv:2405.18392): 1, until a decay to `min_lr_ratio` over the last
      `cooldown_steps` steps before `decay_steps`. With p from 0 to 1, its shape is 1 - p (linear),
      (1 + cos(pi p)) / 2 (cosine) or 1 - sqrt(p) (sqrt).
    - inverse_sqrt (arXiv:1706.03762, section 5.3): sqrt(warmup_steps / step), but at least
      `min_lr_ratio`.

    Args:
        config: `optimizer.scheduler`.
        total_steps: optimizer steps of the run, warm-up included; infinite when it has no end.

    Raises:
        ConfigError: see `check_length`.
    """
    check_length(config, total_steps)
    name, warmup = config["name"], int(config.get("warmup_steps") or 0)
    floor = float(config.get("min_lr_ratio") or 0.0)
    end = config.get("decay_steps") or total_steps
    begin = end - config["cooldown_steps"] if name == "wsd" else warmup
    height = _SHAPES[(config.get("cooldown_shape") or "linear") if name == "wsd" else name]

    # A function, not an object: LambdaLR would store an object's fields in checkpoints, and a
    # resumed run could not be longer.
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if name == "inverse_sqrt":
            return max(floor, math.sqrt(warmup / step))
        if name == "constant" or step <= begin:
            return 1.0
        progress = min(1.0, (step - begin) / max(1, end - begin))
        return floor + (1 - floor) * height(progress)

    return factor


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "constant": lambda progress: 1.0,
    "inverse_sqrt": lambda progress: 1.0,
}
"""Height of a decay above its end, from 1 to 0, as a function of its progress from 0 to 1."""
