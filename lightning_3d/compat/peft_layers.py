"""Layers that PEFT puts in place of a model's own, recognized by their interface, so that PEFT need
not be installed (tried with 0.21).

A LoRA layer (Hu et al. 2021, arXiv:2106.09685) computes `base_layer(x) + scaling *
lora_B(lora_A(x))`. It has the name of the layer that it wraps, so a model's parallel plan still
names it. A wrapper of `modules_to_save` holds a module and a trained copy of it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lightning_3d.errors import PlanError


def own(module: object, name: str) -> Any:
    """An attribute of a module or its class; None if it has none. Attributes that PEFT's models
    only forward to the wrapped model do not count."""
    return getattr(module, name) if inspect.getattr_static(module, name, None) is not None else None


def is_adapter(module: object) -> bool:
    """Return whether `module` is a layer of a PEFT tuner, or a wrapper of a module that is trained
    with it."""
    return any(
        kind.__name__ in ("BaseTunerLayer", "AuxiliaryTrainingWrapper")
        for kind in type(module).__mro__
    )


def is_lora(module: object) -> bool:
    """Return whether `module` is a LoRA layer of any kind."""
    return any(kind.__name__ == "LoraLayer" for kind in type(module).__mro__)


def is_lora_linear(module: object) -> bool:
    """Return whether `module` is a LoRA layer around an `nn.Linear`."""
    lora = any(
        kind.__name__ == "Linear" and kind.__module__ == "peft.tuners.lora.layer"
        for kind in type(module).__mro__
    )
    return lora and isinstance(base_layer(module), nn.Linear)


def base_layer(module: Any) -> object:
    """The layer that an adapter wraps; `module` itself if it is not an adapter."""
    return module.base_layer if is_adapter(module) and "base_layer" in module._modules else module


def lora_variant(layer: Any) -> str | None:
    """Name what a LoRA layer computes in addition to the two products; None for plain LoRA."""
    for adapter, variant in layer.lora_variant.items():
        return "use_dora=True" if layer.use_dora.get(adapter) else type(variant).__name__
    return None


def lora_initializations(root: nn.Module) -> dict[str, Any]:
    """`init_lora_weights` of every adapter in `root`, by adapter."""
    found: dict[str, Any] = {}
    for module in root.modules():
        configs = vars(module).get("peft_config")
        for adapter, config in configs.items() if isinstance(configs, dict) else ():
            found[adapter] = getattr(config, "init_lora_weights", True)
    return found


def refuse_tuners(root: nn.Module, tp: int, pp: int) -> None:
    """Refuse PEFT tuners that need the whole model, in layouts where no rank has it.

    Raises:
        PlanError: prompts or prefixes with pp, prefixes with tp, or AdaLoRA with pp (its loss has a
            term of all layers).
    """
    for module in root.modules():
        # the latter: of prompts
        configs = vars(module).get("peft_config") or vars(module).get("_peft_config")
        for config in configs.values() if isinstance(configs, dict) else ():
            kind = str(getattr(config.peft_type, "value", config.peft_type))
            prompts = bool(getattr(config, "is_prompt_learning", False))
            if (pp > 1 and (prompts or kind == "ADALORA")) or (tp > 1 and kind == "PREFIX_TUNING"):
                axis = "pp" if pp > 1 else "tp"
                raise PlanError(
                    f"PEFT's {kind} needs the whole model on each rank, but {axis} > 1 splits the"
                    f" model. Use LoRA, or {axis}=1."
                )


def refuse_adapted_experts(module: nn.Module, experts: Iterable[str], axis: str) -> None:
    """Refuse PEFT adapters on the parameters of experts, where each rank has only a shard of them.

    Args:
        experts: names of the modules that hold experts.
        axis: axis over which they are sharded, for the message.
    """
    found = dict(module.named_modules())
    for name in experts:
        if name in found and is_adapter(found[name]):
            raise PlanError(
                f"The experts '{name}' have an adapter, so they cannot be sharded ({axis} > 1)."
                f" Adapt other layers, for example target_modules=[q_proj,v_proj], or use {axis}=1."
            )


def origin(name: str) -> str:
    """The name of the parameter whose initial value `name` has: the original's, for a copy in
    `modules_to_save`."""
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".original_module.", name)


def plain_name(root: nn.Module, name: str) -> str | None:
    """The name that a parameter of `root` had before PEFT (for a copy, the original's); None for an
    adapter's own parameters."""
    words, module, path = [], root, name.split(".")
    while path:
        key = path.pop(0)
        if not is_adapter(module):
            words.append(key)
        elif key == "modules_to_save":
            key = f"{key}.{path.pop(0)}"
        elif key not in ("base_layer", "original_module"):
            return None
        module = module.get_submodule(key) if path else module
    return ".".join(words)


def adapters_of(layer: Any) -> Iterator[str]:
    """Names of the adapters that a LoRA layer has."""
    yield from dict.fromkeys([*layer.lora_A, *layer.lora_embedding_A])
