"""What `from_pretrained` of Transformers does to the names in a checkpoint, by its own functions.

`core_model_loading.rename_source_key` and `conversion_mapping.get_model_conversion_mapping` are no public API, but PEFT uses them too.
Tried with Transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn


def is_transformers_model(module: nn.Module) -> bool:
    """Told by name: a module that is none must not cost the import of Transformers."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)


def renamed(model: Any, stored: Iterable[str], names: Collection[str]) -> dict[str, tuple[str, str | None]]:
    """The name in the model of each tensor in a checkpoint, and what has to be computed to make it; None where nothing has to.

    Renames that Transformers declares for a family or for all, and the prefix of the base model, which one of the two may lack.

    Args:
        stored: names in the checkpoint. names: those of the model's parameters and saved buffers, without adapters.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, known = model.base_model_prefix, dict.fromkeys(names, True)
    found: dict[str, tuple[str, str | None]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        operations = None if pattern is None else ", ".join(type(step).__name__ for step in by_pattern[pattern].operations)
        found[key] = name, operations
    return found


def may_be_missing(model: Any, name: str) -> bool:
    """Whether the class of the model expects checkpoints without this parameter or buffer."""
    return _matches(getattr(model, "_keys_to_ignore_on_load_missing", None), name)


def may_be_left_over(model: Any, name: str) -> bool:
    """Whether a tensor in a checkpoint is one of an older version of the class, or a buffer that every model makes itself."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    return _matches(patterns, name) or "rotary_emb.inv_freq" in name


def _matches(patterns: Iterable[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())
