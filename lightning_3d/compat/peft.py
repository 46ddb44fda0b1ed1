"""Adapters by PEFT's own functions: configurations, files, and merging one layer. Tried with PEFT
0.21.

Only functions that rebuild a model import PEFT. Its functions are public, except `get_base_layer`
and `merge` of its layers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.peft_layers import is_adapter, plain_name
from lightning_3d.errors import CheckpointError, install

WEIGHTS = "adapter_model.safetensors"
BASE = "base_model.model."
"""Prefix of PEFT's names in a file: its two wrappers of the model."""


def describe_adapters(root: nn.Module, name: str) -> dict[str, dict[str, Any]]:
    """Read the configurations of the adapters in the model called `name` in `root`, by adapter.
    Plain data."""
    found: dict[str, dict[str, Any]] = {}
    for path, module in root.named_modules():
        around = path in ("", name) or name.startswith(f"{path}.")
        configs = vars(module).get("peft_config") if around else None
        for adapter, config in configs.items() if isinstance(configs, dict) else ():
            found[adapter] = json.loads(json.dumps(config.to_dict(), default=_plain))
    return found


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def inject(model: nn.Module, described: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the adapters that `describe_adapters` described to a model on the meta device.

    Raises:
        CheckpointError: PEFT is not installed or cannot do that.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        raise CheckpointError(
            f"The model has PEFT adapters, which need the package peft. {install('peft')}."
        ) from None
    for adapter, given in described.items():
        config = _config(given)
        if hasattr(config, "init_lora_weights"):
            # some are computed from weights, which do not exist on meta
            config.init_lora_weights = False
        if not Path(config.base_model_name_or_path or "").is_dir():
            config.base_model_name_or_path = None  # otherwise PEFT would look for it on the network
        try:
            with torch.device("meta"):
                inject_adapter_in_model(config, model, adapter)
        except ValueError as error:
            raise CheckpointError(
                f'The adapter "{adapter}" cannot be exported. PEFT says: {error}'
            ) from error


def _config(given: Mapping[str, Any]) -> Any:
    from peft import PeftConfig

    return PeftConfig.from_peft_type(**given)


def adapter_form(model: Any, adapter: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name in an adapter's file to the name of the tensor in the model.

    Args:
        tensors: all tensors of the model, by name; on meta.
    """
    from peft import get_peft_model_state_dict

    names = {id(tensor): name for name, tensor in tensors.items()}
    return {
        BASE + key: names[id(tensor)]
        for key, tensor in get_peft_model_state_dict(model, dict(tensors), adapter).items()
    }


def write_config(model: nn.Module, given: Mapping[str, Any], folder: Path) -> None:
    """Write adapter_config.json, as `PeftModel.save_pretrained` does."""
    config = _config({**given, "inference_mode": True})
    classes = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    config.save_pretrained(
        str(folder), auto_mapping_dict=classes if config.task_type is None else None
    )


def stored_names(model: nn.Module, adapter: str) -> dict[str, str]:
    """Map the name that each parameter and buffer had before PEFT to the name of its value with the
    adapter."""
    found: dict[str, str] = {}
    for name in model.state_dict():
        plain = plain_name(model, name)
        copied = f".modules_to_save.{adapter}." in name
        if plain is not None and (
            copied or (".modules_to_save." not in name and plain not in found)
        ):
            found[plain] = name
    return found


def merging_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose weights change when adapters are merged into them, by name.

    Raises:
        CheckpointError: one is nested in another, so its name is not that of the weight.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if is_adapter(module) and hasattr(module, "merge")
    }
    nested = next(
        (name for name in layers if any(name.startswith(f"{outer}.") for outer in layers)), None
    )
    if nested is not None:
        raise CheckpointError(
            f"The adapter {nested} is inside another adapter, so it cannot be merged. Export"
            " without --merge."
        )
    return layers


def merged(layer: nn.Module, adapter: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Compute the state of the wrapped layer with the adapter merged into it.

    Args:
        layer: on meta. read: gives the value of each of its parameters.
    """
    filled: Any = copy.deepcopy(layer)
    filled.load_state_dict({name: read(name) for name in layer.state_dict()}, assign=True)
    with torch.no_grad():
        filled.merge(adapter_names=[adapter])
    return dict(filled.get_base_layer().state_dict())
