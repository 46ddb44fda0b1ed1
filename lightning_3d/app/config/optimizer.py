"""Checks of the group `optimizer`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_3d.app.config.parameter_groups import check_keys, read_groups, read_patterns
from lightning_3d.app.config.scheduler import HYDRA_KEYS, check_scheduler
from lightning_3d.errors import ConfigError, did_you_mean, listed, plural
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.sizes import require_number
from lightning_3d.options.optimizer import (
    CLOSURE,
    SPARSE,
    WHOLE_TENSOR,
    closure_refusal,
    few_bits_refusal,
    has_few_bits,
    sharding_refusal,
    sparse_refusal,
)

# Arguments of each, besides the common keys.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": ("betas", "eps", "fused"),
    "cpu_adamw": ("betas", "eps", "fused"),
    "sgd": ("momentum", "nesterov", "fused"),
    "muon": ("betas", "eps", "momentum", "nesterov", "ns_steps", "adjust_lr_fn"),
}
MUON = "muon"
_OF_MUON = ("adamw", "adamw_lr")
"""Keys of Muon that are not arguments: they divide the parameters between it and AdamW."""
_ADJUST_LR = ("match_rms_adamw", "original")
_MOST_NS_STEPS = 99  # torch's
_KINDS = ("norm", "bias", "embedding")
NO_DECAY = _KINDS
"""Kinds of parameters without weight decay where a configuration has no key `no_decay`."""
COMMON = ("name", "lr", "weight_decay", "no_decay", "groups", "scheduler")
"""Keys of every optimizer. With a `_target_`, all other keys are arguments of the class."""


def check_optimizer(config: Mapping[str, Any]) -> None:
    """Refuse an optimizer configuration that cannot work. Needs no torch, so it can run before
    ranks are started.

    Raises:
        ConfigError: an unknown name or key, or a number out of range.
    """
    name, target = config.get("name"), config.get("_target_")
    if target is not None:
        _check_class(config)
    elif not isinstance(name, str) or name not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer.name must be {listed(OPTIMIZERS, last='or')}; got {name!r}. For another"
            " optimizer of torch, use optimizer=torch optimizer._target_=torch.optim.NAME."
        )
    else:
        check_keys(
            "optimizer", config, (*COMMON, *OPTIMIZERS[name], *(_OF_MUON if name == MUON else ()))
        )
    require_number("optimizer.lr", config.get("lr"), lambda x: x > 0, "above 0, for example 3e-4")
    for key in ("weight_decay", "eps", "momentum"):
        if config.get(key) is not None and not (target is not None and key == "eps"):
            require_number(f"optimizer.{key}", config[key], lambda x: x >= 0, "of at least 0")
    if target is None:
        _check_betas(config.get("betas", (0.9, 0.95)))
    if name == "cpu_adamw" and config.get("fused") is not None:
        raise ConfigError(
            "optimizer.fused is an option of adamw and sgd, because cpu_adamw is always fused. Omit"
            " it, or set it to null."
        )
    if has_few_bits(str(target)) and config.get("block_size") is not None:
        _check_block_size(config["block_size"])
    if name == MUON:
        _check_muon(config)
    _check_kinds(undecayed_kinds(config))
    read_groups(config.get("groups"))
    if config.get("scheduler") is not None:
        check_scheduler(config["scheduler"])


def check_sharding(config: Mapping[str, Any], layout: Layout, zero_stage: int) -> None:
    """Refuse an optimizer that is known to need whole tensors, sparse gradients, or calls of the
    loss, where the layout cannot give them.

    Ranks check unknown classes by a small step (`parallel.trials.optimizers`).

    Args:
        config: the group `optimizer`.
        layout: the layout.
        zero_stage: what data-parallel ranks shard.

    Raises:
        ConfigError: with the optimizers that work.
    """
    target = str(config.get("_target_") or "")
    name = target.rpartition(".")[2]
    if name in CLOSURE:
        raise ConfigError(closure_refusal(name))
    if name in SPARSE:
        raise ConfigError(sparse_refusal(name))
    axes = [f"{axis}{size}" for axis, size in (("tp", layout.tp), ("ep", layout.ep)) if size > 1]
    by = [*axes, *([f"zero_stage={zero_stage}"] if zero_stage > 0 else [])]
    if has_few_bits(target) and by:
        raise ConfigError(few_bits_refusal(name, listed(by), layout))
    if name in WHOLE_TENSOR and by:
        raise ConfigError(sharding_refusal(name, listed(by)))


def _check_block_size(size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(
            "optimizer.block_size must be a whole number of at least 1, for example 256; got"
            f" {size!r}."
        )


def adamw_patterns(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Patterns of the matrices that AdamW trains although the optimizer is Muon."""
    return read_patterns("optimizer.adamw", config.get("adamw") or ())


def _check_class(config: Mapping[str, Any]) -> None:
    """Check an optimizer that is named by its class."""
    target, name = config["_target_"], config.get("name")
    if name is not None:
        raise ConfigError(
            f"optimizer has both name={name} and _target_={target}. To use another class, use"
            f" optimizer=torch optimizer._target_={target}."
        )
    for key, value in config.items():
        if key not in (*COMMON, *HYDRA_KEYS) and isinstance(value, Mapping) and "_target_" in value:
            raise ConfigError(
                f"optimizer.{key} must be a plain value; got an object with a _target_. Write the"
                " value itself."
            )


def _check_muon(config: Mapping[str, Any]) -> None:
    if config.get("adamw_lr") is not None:
        require_number(
            "optimizer.adamw_lr", config["adamw_lr"], lambda x: x > 0, "above 0, for example 3e-4"
        )
    if config.get("momentum") is not None:
        require_number("optimizer.momentum", config["momentum"], lambda x: x < 1, "less than 1")
    steps = config.get("ns_steps", 5)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= _MOST_NS_STEPS:
        raise ConfigError(
            f"optimizer.ns_steps must be a whole number from 1 to {_MOST_NS_STEPS}, usually 5; got"
            f" {steps!r}."
        )
    rule = config.get("adjust_lr_fn", _ADJUST_LR[0])
    if rule not in _ADJUST_LR:
        near = did_you_mean(str(rule), _ADJUST_LR)
        raise ConfigError(
            f"optimizer.adjust_lr_fn must be {listed(_ADJUST_LR, last='or')}; got {rule!r}.{near}"
        )
    if config.get("adamw") is not None:
        read_patterns("optimizer.adamw", config["adamw"])


def _check_betas(betas: Any) -> None:
    if isinstance(betas, str) or not isinstance(betas, Sequence):
        raise ConfigError(
            f"optimizer.betas must be two numbers, for example [0.9, 0.95]; got {betas!r}."
        )
    if len(betas) != 2:
        raise ConfigError(
            "optimizer.betas must be two numbers, for example [0.9, 0.95]; got"
            f" {plural(len(betas), 'number')}."
        )
    for beta in betas:
        require_number(
            "each of optimizer.betas", beta, lambda x: 0 <= x < 1, "of at least 0 and less than 1"
        )


def undecayed_kinds(config: Mapping[str, Any]) -> Any:
    """Return the kinds of parameters that an optimizer configuration does not decay: `NO_DECAY` if
    it does not say; null means none."""
    return config.get("no_decay", NO_DECAY) or ()


def _check_kinds(kinds: Any) -> None:
    if isinstance(kinds, str) or not isinstance(kinds, Sequence):
        raise ConfigError(
            f"optimizer.no_decay must be a list, for example [norm, bias]; got {kinds!r}."
        )
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ConfigError(
                f"optimizer.no_decay may contain {listed(_KINDS)}; got"
                f" {kind!r}.{did_you_mean(str(kind), _KINDS)}"
            )
