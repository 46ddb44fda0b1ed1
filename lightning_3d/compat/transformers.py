"""Renaming and conversion of checkpoint tensors, by the functions of Transformers'
`from_pretrained` and `save_pretrained`.

`core_model_loading.rename_source_key`, `revert_weight_conversion` and
`conversion_mapping.get_model_conversion_mapping` are not public, but PEFT uses them too. Tried with
Transformers 5.23 and 5.24.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_3d.compat.peft import describe_adapters
from lightning_3d.compat.peft_layers import is_adapter
from lightning_3d.errors import CheckpointError


def is_transformers_model(module: nn.Module) -> bool:
    """Return whether `module` is a Transformers model. Decided by class name: other modules must
    not cost the import of Transformers."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)


def is_transposed_linear(module: object) -> bool:
    """Return whether `module` is Transformers' Conv1D (GPT-2): a linear layer with a weight of
    shape (in, out), and a bias."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
        for kind in type(module).__mro__
    )


def linear_sizes(module: Any) -> tuple[int, int] | None:
    """Return (inputs, outputs) of a linear layer, of torch or Transformers' Conv1D; None for any
    other module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (module.nx, module.nf) if is_transposed_linear(module) else None


def models_in(root: nn.Module) -> dict[str, nn.Module]:
    """Find the Transformers models in a module, by name, without those inside others."""
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if is_transformers_model(module) and not any(
            outer == "" or name.startswith(f"{outer}.") for outer in found
        ):
            found[name] = module
    return found


@dataclass(frozen=True)
class Made:
    """Recipe of Transformers for building a parameter from stored tensors.

    Attributes:
        pattern: pattern that the name of this stored tensor matches.
        patterns: patterns of all tensors that are needed, in order.
        operations: names of the operations, for messages.
        tiling: (stacked, dim), the arguments of `weights.stored.Tiling`; None unless the tensors
            are only concatenated or stacked.
    """

    pattern: str
    patterns: tuple[str, ...]
    operations: str
    tiling: tuple[bool, int | None] | None


def renamed(
    model: Any, stored: Iterable[str], names: Collection[str]
) -> dict[str, tuple[str, Made | None]]:
    """Map each tensor in a checkpoint to its name in the model, and to how the parameter is built
    (None: it is the parameter).

    Applies the renames that Transformers declares for the family or for all, and adds or removes
    the prefix of the base model. Sorted by name, with numbers by value.

    Args:
        stored: names in the checkpoint.
        names: names of the model's parameters and saved buffers, without adapters.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    prefix, known = model.base_model_prefix, dict.fromkeys(names, True)
    found: dict[str, tuple[str, Made | None]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        found[key] = name, None if pattern is None else _made(by_pattern[pattern], pattern)
    return found


def _made(converter: Any, pattern: str) -> Made:
    steps = {type(step).__name__: step for step in converter.operations}
    words = ", ".join(type(step).__name__ for step in converter.operations)
    stack, join = steps.pop("MergeModulelist", None), steps.pop("Concatenate", None)
    simple = not steps and len(converter.target_patterns) == 1 and (stack is None or stack.dim == 0)
    tiling = (stack is not None, None if join is None else join.dim) if simple else None
    return Made(pattern, tuple(converter.source_patterns), words, tiling)


def may_be_missing(model: Any, name: str) -> bool:
    """Return whether the model's class expects checkpoints without this parameter or buffer."""
    return _matches(getattr(model, "_keys_to_ignore_on_load_missing", None), name)


def may_be_left_over(model: Any, name: str) -> bool:
    """Return whether a checkpoint tensor may be unused: from an older version of the class, or a
    buffer that models compute."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    return _matches(patterns, name) or "rotary_emb.inv_freq" in name


def _matches(patterns: Iterable[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def describe_models(root: nn.Module) -> dict[str, dict[str, Any]]:
    """Describe every Transformers model in a module, by name: class, configuration, PEFT adapters,
    and number of modules of multi-token prediction."""
    return {
        name: {
            "class": type(model).__name__,
            "config": json.loads(cast(Any, model).config.to_json_string(use_diff=False)),
            "adapted": any(is_adapter(layer) for layer in model.modules()),
            "adapters": describe_adapters(root, name),
            "mtp_layers": getattr(model, "mtp_layers", 0),
        }
        for name, model in models_in(root).items()
    }


def build_on_meta(class_name: str, config: Mapping[str, Any]) -> Any:
    """Build a model on the meta device.

    Raises:
        CheckpointError: Transformers does not have this class.
    """
    import transformers

    kind = getattr(transformers, class_name, None)
    if kind is None:
        raise CheckpointError(
            f"Transformers {transformers.__version__} has no class {class_name}, but the"
            " checkpoint's model needs it. Install a release that has it."
        )
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(dict(config)))
    _keep_conversions(model)
    return model


def _keep_conversions(model: Any) -> None:
    """Store the conversions on the model, so that `stored_form` need not search all modules for
    every tensor.

    `from_pretrained` uses the same attribute. A `PrefixChange` is left out: whether the files had
    that prefix is not known.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    found = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [entry for entry in found if type(entry).__name__ != "PrefixChange"]


def stored_form(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert some of the model's tensors to what `save_pretrained` writes: experts one by one,
    names of the published files."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


def keeps_float32(model: Any, name: str) -> bool:
    """Return whether the model's class requires this tensor in float32, whatever the dtype of the
    others."""
    patterns = (
        getattr(model, "_keep_in_fp32_modules", None),
        getattr(model, "_keep_in_fp32_modules_strict", None),
    )
    return any(pattern in name for found in patterns for pattern in found or ())


def registered_functions() -> list[tuple[str, Any]]:
    """Functions and classes in the tables of Transformers' code (attentions, masks, experts,
    activations, rotary positions), with places.

    `GeneralInterface` keeps its entries in `_global_mapping` and `_local_mapping`. Tried with
    Transformers 5.23 and 5.24.
    """
    found: dict[int, tuple[str, Any]] = {}
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("transformers.") or not isinstance(module, ModuleType):
            continue
        for key, table in list(vars(module).items()):
            shared = getattr(type(table), "_global_mapping", None)
            own = getattr(table, "__dict__", {}).get("_local_mapping")
            for entries in (table if key.isupper() else None, shared, own):
                if isinstance(entries, dict) and id(entries) not in found:
                    found[id(entries)] = (f"{name}.{key}", entries)
    return [
        (f"{place}[{key!r}]", value)
        for place, table in found.values()
        for key, value in dict.items(table)
        if callable(value)
    ]
