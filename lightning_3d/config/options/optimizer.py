"""Checks for the keys of an optimizer and a scheduler. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_3d.errors import ConfigError, did_you_mean, listed, plural
from lightning_3d.layout.sizes import is_finite

if TYPE_CHECKING:
    pass


# Arguments of each, besides lr, weight_decay, no_decay and scheduler.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": ("betas", "eps", "fused"),
    "cpu_adamw": ("betas", "eps", "fused"),
    "sgd": ("momentum", "nesterov"),
}
_SCHEDULES = ("constant", "linear", "cosine")
_KINDS = ("norm", "bias", "embedding")
_COMMON = ("name", "lr", "weight_decay", "no_decay", "scheduler")
_SCHEDULER_KEYS = ("name", "warmup_steps", "min_lr_ratio", "decay_steps")


def check_optimizer(config: Mapping[str, Any]) -> None:
    """Refuse an optimizer configuration that cannot work. Needs no torch, so it can run before ranks are started.

    Raises:
        ConfigError: an unknown name or key, or a number out of range.
    """
    name = config.get("name")
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise ConfigError(f"optimizer.name must be {listed(OPTIMIZERS, last='or')}; got {name!r}.")
    _check_keys("optimizer", config, (*_COMMON, *OPTIMIZERS[name]))
    _require("optimizer.lr", config.get("lr"), lambda x: x > 0, "above 0, for example 3e-4")
    for key in ("weight_decay", "eps", "momentum"):
        if config.get(key) is not None:
            _require(f"optimizer.{key}", config[key], lambda x: x >= 0, "of at least 0")
    betas = config.get("betas", (0.9, 0.95))
    if isinstance(betas, str) or not isinstance(betas, Sequence):
        raise ConfigError(f"optimizer.betas must be two numbers, for example [0.9, 0.95]; got {betas!r}.")
    if len(betas) != 2:
        raise ConfigError(f"optimizer.betas must be two numbers, for example [0.9, 0.95]; got {plural(len(betas), 'number')}.")
    for beta in betas:
        _require("each of optimizer.betas", beta, lambda x: 0 <= x < 1, "of at least 0 and less than 1")
    if name == "cpu_adamw" and config.get("fused") is not None:
        raise ConfigError("optimizer.fused is an option of adamw only, because cpu_adamw is always fused. Omit it, or set it to null.")
    kinds = config.get("no_decay") or ()
    if isinstance(kinds, str) or not isinstance(kinds, Sequence):
        raise ConfigError(f"optimizer.no_decay must be a list, for example [norm, bias]; got {kinds!r}.")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ConfigError(
                f"optimizer.no_decay may contain {listed(_KINDS)}; got {kind!r}.{did_you_mean(str(kind), _KINDS)}"
            )
    if config.get("scheduler") is not None:
        _check_scheduler(config["scheduler"])


def _check_scheduler(config: Any) -> None:
    if not isinstance(config, Mapping):
        raise ConfigError(f"optimizer.scheduler must be a mapping; got {config!r}. Use optimizer.scheduler.name={config}.")
    name = config.get("name")
    if not isinstance(name, str) or name not in _SCHEDULES:
        raise ConfigError(f"optimizer.scheduler.name must be {listed(_SCHEDULES, last='or')}; got {name!r}.")
    _check_keys("optimizer.scheduler", config, _SCHEDULER_KEYS)
    _require("optimizer.scheduler.warmup_steps", config.get("warmup_steps", 0), lambda x: x >= 0, "of at least 0")
    if config.get("min_lr_ratio") is not None:
        _require("optimizer.scheduler.min_lr_ratio", config["min_lr_ratio"], lambda x: 0 <= x <= 1, "from 0 to 1")
    if config.get("decay_steps") is not None:
        _require("optimizer.scheduler.decay_steps", config["decay_steps"], lambda x: x >= 1, "of at least 1")


def _check_keys(what: str, config: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in config:
        if key not in known:
            raise ConfigError(
                f"{what} has no option '{key}'. Its options are {listed(known)}.{did_you_mean(str(key), known)}"
            )


def _require(what: str, value: Any, holds: Callable[[float], bool], wanted: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and is_finite(value)
    if not number or not holds(value):
        raise ConfigError(f"{what} must be a number {wanted}; got {value!r}.")
