"""The optimizer that the group `optimizer` describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from lightning_3d.app.config.optimizer import COMMON, MUON, OPTIMIZERS, check_optimizer
from lightning_3d.app.config.parameter_groups import KEY as GROUPS
from lightning_3d.app.config.parameter_groups import read_groups
from lightning_3d.app.config.scheduler import HYDRA_KEYS
from lightning_3d.app.training.objects import find_class
from lightning_3d.app.training.parameter_groups import NamedGroup
from lightning_3d.app.training.schedules import make_scheduler
from lightning_3d.compat.deepspeed import import_deepspeed
from lightning_3d.errors import ConfigError, did_you_mean, listed, plural
from lightning_3d.parallel.zero.muon import MuonWithAdamW

if TYPE_CHECKING:
    from torch import device, nn
    from torch.optim import Optimizer

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""Classes of `torch.optim` that have fused CUDA kernels (torch 2.11 to 2.13)."""


def make_optimizer(
    config: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    groups: Sequence[NamedGroup],
    steps_on: device | None = None,
) -> Optimizer:
    """Build the optimizer.

    Args:
        config: see `conf/optimizer/`.
        parameters: trainable parameters of this rank by name.
        groups: result of `find_groups`. Every rank makes all of them, also those of which it has no
            parameter.
        steps_on: device on which the optimizer steps, which decides whether it is fused if `config`
            does not; None: torch decides.

    `cpu_adamw` compiles C++ when it is used for the first time on a machine, which takes minutes.

    Raises:
        ConfigError: the class cannot be used, or refuses the arguments or the parameters; or a
            parameter is in no group.
    """
    import torch

    check_optimizer(config)
    _require_grouped(parameters, groups)
    made = [
        {
            "params": [value for name, value in parameters.items() if name in group.names],
            **group.options,
        }
        for group in groups
    ]
    if config.get("_target_") is not None:
        return _make_of_class(config, made, steps_on)
    options = _arguments(config, OPTIMIZERS[config["name"]])
    if config["name"] == "cpu_adamw":
        import_deepspeed(
            next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        )
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(made, lr=float(config["lr"]), **options)
    if config["name"] == MUON:
        return MuonWithAdamW(made, lr=float(config["lr"]), **options)
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[config["name"]]
    options = _fused_where_it_can_be(optimizer, options, made, steps_on)
    if not options.get("fused"):  # False would also turn off foreach, torch's default on GPUs
        options.pop("fused", None)
    return optimizer(made, lr=float(config["lr"]), **options)


def decay_of(config: Mapping[str, Any]) -> float:
    """Return the weight decay of the optimizer: the configured one, or the default of its class.

    Raises:
        ConfigError: a weight decay, of the optimizer or of one of its groups, for a class that has
            none.
    """
    given = config.get("weight_decay")
    if config.get("_target_") is None:
        return float(given or 0.0)
    accepted = _parameters_of(_find(config))
    if "weight_decay" not in accepted and not _takes_any(accepted):
        groups = {
            f"{GROUPS}[{index}]": group.weight_decay
            for index, group in enumerate(read_groups(config.get("groups")))
        }
        for key, value in {"optimizer": given, **groups}.items():
            if value:
                raise ConfigError(
                    f"{config['_target_']} has no weight decay. Set {key}.weight_decay=0; got"
                    f" {value}."
                )
    default = accepted["weight_decay"].default if "weight_decay" in accepted else 0.0
    return float(
        given if given is not None else default if isinstance(default, (int, float)) else 0.0
    )


def try_optimizer(config: Mapping[str, Any]) -> None:
    """Build an optimizer or a schedule that is named by its class for a small matrix, to refuse it
    before the model is built.

    Raises:
        ConfigError: see `make_optimizer` and `make_scheduler`.
    """
    import torch

    schedule = config.get("scheduler") or {}
    if config.get("_target_") is None and schedule.get("_target_") is None:
        return
    # it would compile C++ for minutes
    tried = {**config, "name": "adamw"} if config.get("name") == "cpu_adamw" else config
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    group = NamedGroup(frozenset({"weight"}), {"weight_decay": decay_of(config)})
    optimizer = make_optimizer(tried, {"weight": weight}, [group])
    if schedule.get("_target_") is not None:
        make_scheduler(optimizer, schedule, math.inf)


def _require_grouped(parameters: Iterable[str], groups: Sequence[NamedGroup]) -> None:
    """Refuse parameters that no group has: they would never be trained, and this rank cannot add
    them to groups that all ranks have."""
    grouped = frozenset[str]().union(*(group.names for group in groups))
    others = [name for name in parameters if name not in grouped]
    if others:
        raise ConfigError(
            f"{plural(len(others), 'trained parameter')} would be in no group of the optimizer, for"
            f" example {others[0]}. A subclass of CausalLM that adds or unfreezes parameters in"
            " configure_model must call self.group_parameters() at its end."
        )


def _fused_where_it_can_be(
    kind: Callable[..., Any],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    steps_on: device | None,
) -> dict[str, Any]:
    """Add `fused=True` to the arguments of a class where it steps on a GPU and has a kernel for its
    parameters.

    Arguments that already choose an implementation stay. On a CPU, a fused step would round
    differently from torch's default.
    """
    import torch

    chosen = any(key in options for key in ("fused", "foreach", "differentiable"))
    if (
        steps_on is None
        or steps_on.type != "cuda"
        or chosen
        or kind not in [getattr(torch.optim, name) for name in FUSED]
    ):
        return dict(options)
    known = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    fits = all(parameter.dtype in known for group in groups for parameter in group["params"])
    return {**options, "fused": True} if fits else dict(options)


def _make_of_class(
    config: Mapping[str, Any], groups: list[dict[str, Any]], steps_on: device | None
) -> Optimizer:
    """Build an optimizer whose class the configuration names."""
    from torch.optim import Optimizer

    target, kind = config["_target_"], _find(config)
    options = _arguments(config, [key for key in config if key not in (*COMMON, *HYDRA_KEYS)])
    accepted = _parameters_of(kind)
    unknown = [key for key in options if key not in accepted]
    if unknown and not _takes_any(accepted):
        known = [name for name in accepted if name not in ("self", "params")]
        raise ConfigError(
            f"{target} has no argument '{unknown[0]}'. It has"
            f" {listed(known)}.{did_you_mean(unknown[0], known)}"
        )
    if "weight_decay" not in accepted and not _takes_any(accepted):
        groups = [
            {key: value for key, value in group.items() if key != "weight_decay"}
            for group in groups
        ]
    options = _fused_where_it_can_be(kind, options, groups, steps_on)
    try:
        optimizer = kind(groups, lr=float(config["lr"]), **options)
    except Exception as error:
        raise ConfigError(
            f"Cannot create optimizer ({target}):"
            f" {next(iter(str(error).splitlines()), type(error).__name__)}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer._target_={target} made a {type(optimizer).__name__}. It must make an"
            " Optimizer of torch."
        )
    return optimizer


def _find(config: Mapping[str, Any]) -> Any:
    from torch.optim import Optimizer

    return find_class("optimizer", config["_target_"], (Optimizer,))


def _parameters_of(kind: Callable[..., Any]) -> Mapping[str, Parameter]:
    return signature(kind).parameters


def _takes_any(accepted: Mapping[str, Parameter]) -> bool:
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in accepted.values())


def _arguments(config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Arguments of the class that are given, with tuples for lists, as torch writes them into
    parameter groups and checkpoints."""
    return {
        key: tuple(config[key]) if isinstance(config[key], list) else config[key]
        for key in keys
        if config.get(key) is not None
    }
