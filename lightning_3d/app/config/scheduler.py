"""Checks of `optimizer.scheduler`, the learning-rate schedule. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_3d.app.config.parameter_groups import check_keys
from lightning_3d.errors import ConfigError, did_you_mean, listed
from lightning_3d.layout.sizes import require_number

KEY = "optimizer.scheduler"
SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")
SHAPES = ("linear", "cosine", "sqrt")
"""Shapes of the decay at the end of `wsd`."""
DECAYING = ("linear", "cosine", "wsd")
"""Schedules that end their decay at a given step: `decay_steps`, or the end of the run."""
HYDRA_KEYS = ("_target_", "_partial_", "_convert_", "_recursive_")
"""Keys of Hydra that an entry with a `_target_` may have. All but the first are ignored."""
_KEYS = ("name", "warmup_steps", "min_lr_ratio", "decay_steps", "cooldown_steps", "cooldown_shape")
_SHORT_WARMUP = 20
"""Steps of a warm-up that is not worth a warning in a run that is even shorter: that of most files
in `conf/optimizer`."""
_OF_WSD = ("cooldown_steps", "cooldown_shape")


def check_scheduler(config: Any) -> None:
    """Refuse a schedule that cannot work.

    Raises:
        ConfigError: an unknown name, shape or key, or a number out of range.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{KEY} must be a mapping; got {config!r}. Use {KEY}.name={config}.")
    if config.get("_target_") is not None:
        _check_class(config)
        return
    name = config.get("name")
    if not isinstance(name, str) or name not in SCHEDULES:
        near = did_you_mean(str(name), SCHEDULES)
        raise ConfigError(f"{KEY}.name must be {listed(SCHEDULES, last='or')}; got {name!r}.{near}")
    check_keys(KEY, config, _KEYS)
    require_number(
        f"{KEY}.warmup_steps", config.get("warmup_steps", 0), lambda x: x >= 0, "of at least 0"
    )
    if config.get("min_lr_ratio") is not None:
        require_number(
            f"{KEY}.min_lr_ratio", config["min_lr_ratio"], lambda x: 0 <= x <= 1, "from 0 to 1"
        )
    if config.get("decay_steps") is not None:
        require_number(
            f"{KEY}.decay_steps", config["decay_steps"], lambda x: x >= 1, "of at least 1"
        )
    _check_own_keys(name, config)


def check_length(config: Mapping[str, Any] | None, total_steps: float) -> None:
    """Refuse a schedule whose parts are longer than the run.

    Args:
        config: `optimizer.scheduler`, already checked; None: the learning rate is constant.
        total_steps: optimizer steps of the run, infinite if it has no end.

    Raises:
        ConfigError: the schedule decays, but the run has no end; its warm-up is longer than
            `decay_steps`; or there is no room for the warm-up and the cooldown of `wsd`.
    """
    if config is None or config.get("_target_") is not None or config["name"] not in DECAYING:
        return
    end = config.get("decay_steps") or total_steps
    if not math.isfinite(end):
        raise ConfigError(
            f"{KEY}.name={config['name']} decays until the end of the run, but the run has no end."
            f" Set trainer.max_steps or {KEY}.decay_steps."
        )
    warmup, cooldown = config.get("warmup_steps") or 0, config.get("cooldown_steps") or 0
    if config["name"] == "wsd" and warmup + cooldown > end:
        raise ConfigError(
            f"{KEY}: a warm-up of {warmup} steps and a cooldown of {cooldown} steps do not fit into"
            f" the {end:.0f} steps of the schedule. Use shorter ones, or a longer run."
        )
    if config.get("decay_steps") is not None and warmup > end:
        raise ConfigError(
            f"{KEY}.warmup_steps={warmup} is above {KEY}.decay_steps={end}, so the decay would end"
            f" before it begins. Use {KEY}.decay_steps of at least {warmup}, or {KEY}.warmup_steps"
            f" of at most {end}."
        )


def endless_warmup(config: Mapping[str, Any] | None, max_steps: int) -> str | None:
    """Return a warning about a warm-up that is longer than the run; None if it is not.

    Args:
        config: `optimizer.scheduler`, already checked.
        max_steps: `trainer.max_steps`. A run this short may be a trial of a longer one, so it is
            not refused.
    """
    if config is None or config.get("_target_") is not None:
        return None
    warmup = config.get("warmup_steps") or 0
    if warmup <= max(max_steps, _SHORT_WARMUP):
        return None
    return (
        f"{KEY}.warmup_steps={warmup} is above trainer.max_steps={max_steps}, so the warm-up never"
        f" ends: the learning rate reaches only {max_steps / warmup:.2g} of optimizer.lr. Use"
        f" {KEY}.warmup_steps of at most {max_steps}, or more steps."
    )


def _check_own_keys(name: str, config: Mapping[str, Any]) -> None:
    """Check the keys that only one schedule has."""
    for key in _OF_WSD:
        if name != "wsd" and config.get(key) is not None:
            raise ConfigError(
                f"{KEY}.{key} is an option of wsd only; got {config[key]!r} with {name}. Omit it,"
                " or set it to null."
            )
    if name == "wsd":
        wanted = (
            "of at least 2, because the first step of the cooldown still has the full learning rate"
        )
        require_number(
            f"{KEY}.cooldown_steps", config.get("cooldown_steps"), lambda x: x >= 2, wanted
        )
        shape = config.get("cooldown_shape")
        if shape is not None and shape not in SHAPES:
            near = did_you_mean(str(shape), SHAPES)
            raise ConfigError(
                f"{KEY}.cooldown_shape must be {listed(SHAPES, last='or')}; got {shape!r}.{near}"
            )
    if name == "inverse_sqrt":
        wanted = (
            "of at least 1 with inverse_sqrt, because the decay begins with sqrt(warmup_steps /"
            " step)"
        )
        require_number(f"{KEY}.warmup_steps", config.get("warmup_steps"), lambda x: x >= 1, wanted)
        if config.get("decay_steps") is not None:
            raise ConfigError(
                f"{KEY}.decay_steps is not an option of inverse_sqrt, whose decay has no end. Omit"
                " it, or set it to null."
            )


def _check_class(config: Mapping[str, Any]) -> None:
    """Check the keys of a schedule that is a class of its own."""
    mixed = [key for key in _KEYS if key in config]
    if mixed:
        raise ConfigError(
            f"{KEY} has _target_ and also {listed(mixed)}, which are options of the built-in"
            f" schedules. Remove these first: ~{KEY} +{KEY}._target_={config['_target_']}, and add"
            " the arguments of the class with + as well."
        )
    if str(config["_target_"]).rpartition(".")[2] == "ReduceLROnPlateau":
        raise ConfigError(
            f"{KEY}._target_={config['_target_']} needs a validation loss at each step. Use a"
            f" schedule that depends on the step only: {KEY}.name={listed(SCHEDULES, last='or')},"
            " or another class of torch.optim.lr_scheduler."
        )
