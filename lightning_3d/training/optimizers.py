"""The optimizer and the learning-rate schedule that an `optimizer/` config file describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_3d.compat.deepspeed import import_deepspeed
from lightning_3d.config.options.optimizer import OPTIMIZERS, check_optimizer
from lightning_3d.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def undecayed_names(model: nn.Module, kinds: Sequence[str]) -> frozenset[str]:
    """Names of the parameters of a whole model that are not decayed.

    Args:
        model: the model as the user built it; tensors may be on meta.
        kinds: any of "norm" (parameters of modules whose class name contains it), "bias", and "embedding" (input embeddings,
            and an output head that is tied to one).
    """
    from torch import nn

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    names = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            kind = "norm" if "norm" in type(module).__name__.lower() else "bias" if name.endswith("bias") else ""
            kind = "embedding" if id(parameter) in embeddings else kind
            if kind in kinds:
                names.add(f"{path}.{name}" if path else name)
    return frozenset(names)


def make_optimizer(
    config: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], undecayed: frozenset[str]
) -> Optimizer:
    """Build the optimizer.

    Args:
        config: see `conf/optimizer/`.
        parameters: trainable parameters by name.
        undecayed: names for which weight decay is 0. Without weight decay there is one parameter group, else two.

    `cpu_adamw` compiles C++ when it is used for the first time on a machine, which takes minutes.
    """
    import torch

    check_optimizer(config)
    decay = float(config.get("weight_decay") or 0.0)
    groups = [{"params": list(parameters.values()), "weight_decay": decay}]
    if decay > 0 and undecayed:
        decayed = [p for name, p in parameters.items() if name not in undecayed]
        kept = [p for name, p in parameters.items() if name in undecayed]
        groups = [{"params": decayed, "weight_decay": decay}, {"params": kept, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
    options = {key: config[key] for key in OPTIMIZERS[config["name"]] if config.get(key) is not None}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    if config["name"] == "cpu_adamw":
        import_deepspeed(next((parameter.device for parameter in parameters.values()), torch.device("cpu")))
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=float(config["lr"]), **options)
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[config["name"]]
    return optimizer(groups, lr=float(config["lr"]), **options)


def lr_factor(config: Mapping[str, Any], total_steps: float) -> Callable[[int], float]:
    """Make the function from step 0, 1, ... to the multiple of the configured learning rate.

    Warm-up is linear and reaches 1 at its last step. Then the factor stays at 1 ("constant"), or decays to
    `min_lr_ratio` linearly or along half a cosine until `decay_steps` (default: the end of the run) and stays there.

    Args:
        config: `optimizer.scheduler`.
        total_steps: optimizer steps of the run, warm-up included; infinite when it has no end.

    Raises:
        ConfigError: the schedule decays, but the run has no end.
    """
    name, warmup = config["name"], int(config.get("warmup_steps") or 0)
    floor = float(config.get("min_lr_ratio") or 0.0)
    end = config.get("decay_steps") or total_steps
    if name != "constant" and not math.isfinite(end):
        raise ConfigError(
            f"optimizer.scheduler.name={name} decays until the end of the run, but the run has no end. Set"
            " trainer.max_steps or optimizer.scheduler.decay_steps."
        )

    # A function, not an object: LambdaLR would store an object's fields in checkpoints, and a resumed run could not be longer.
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if name == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, end - warmup))
        height = 1 - progress if name == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return floor + (1 - floor) * height

    return factor
