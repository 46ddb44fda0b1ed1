"""Pretrained weights: every rank reads only its own slices from safetensors files.

`load_pretrained(model, folder)` marks a model that is on the meta device; `initialize` fills it
after it was partitioned and sharded. Every rank reads for itself, and ranks do not communicate. A
rank has its own shards in memory, and maps one file at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_3d.compat.peft_layers import own, plain_name
from lightning_3d.compat.transformers import (
    is_transformers_model,
    may_be_left_over,
    may_be_missing,
    renamed,
)
from lightning_3d.errors import CheckpointError, listed
from lightning_3d.models.pretrained_config import refuse_shapes
from lightning_3d.models.safetensors_folder import FLOATS, StoredTensor, find_folder, read_tensors
from lightning_3d.parallel.sharding import replicated
from lightning_3d.weights.stored import StoredReader, StoredValue, Tiling

M = TypeVar("M", bound=nn.Module)
_MARK = "_lightning_3d_pretrained"

Stored = tuple[StoredValue, ...]
"""Places of a parameter's value; several for tied parameters that were saved under each of their
names."""


@dataclass(frozen=True)
class Pretrained:
    """Source of a marked model's weights."""

    folder: Path
    strict: bool


def load_pretrained(model: M, path: str | os.PathLike[str], *, strict: bool = True) -> M:
    """Load weights into `model` from a folder that `save_pretrained` of Transformers wrote
    (`model.safetensors`, or several files).

    Parameters on the meta device, such as all that `configure_model` builds, are read later: when
    the strategy or `initialize` creates the weights, each rank reads only its own slices.
    Parameters that are already in memory are overwritten at once. You may add adapters before or
    after this call.

    Args:
        model: a Transformers model, or any module whose names are those in the files. For
            Transformers models, names of older versions work as in `from_pretrained`.
        path: a folder, or the name of a Hugging Face hub model that was downloaded before.
        strict: whether to refuse parameters that are not stored and stored tensors that the model
            does not have. If False, missing parameters are initialized from the seed (or kept, if
            they are in memory), and unknown tensors are ignored.

    Returns:
        `model` itself.

    Raises:
        CheckpointError: the folder is missing, damaged or incomplete, contains only pickles, or its
            names do not match the model.
        ConfigError: shapes differ.
    """
    inner = own(model, "get_base_model")
    # PEFT's wrapper has no weights of its own
    target: nn.Module = inner() if callable(inner) else model
    mark = Pretrained(find_folder(path), strict)
    reader = StoredReader()
    for name, stored in _match(target, mark).items():
        tensor = _tensor(target, name)
        if not tensor.is_meta:
            with torch.no_grad():
                tensor.copy_(
                    reader.read(
                        stored, replicated(name, tensor.shape, 1), tensor.dtype, tensor.device
                    )
                )
    object.__setattr__(target, _MARK, mark)
    return model


def forget_pretrained(root: nn.Module) -> None:
    """Remove the marks of `load_pretrained` from a copy, so that it is not filled from files."""
    for module in root.modules():
        vars(module).pop(_MARK, None)


def stored_values(root: nn.Module) -> dict[str, Stored]:
    """Find the stored values of parameters and saved buffers of marked modules, by first name in
    `root`, which is whole.

    Raises:
        CheckpointError, ConfigError: see `load_pretrained`.
    """
    found = {}
    first: dict[int, str] = {}
    for name, tensor in _saved(root):
        first.setdefault(id(tensor), name)
    for module in root.modules():
        mark = vars(module).get(_MARK)
        for name, stored in _match(module, mark).items() if mark is not None else ():
            found[first[id(_tensor(module, name))]] = stored
    return found


def _tensor(module: nn.Module, name: str) -> Tensor:
    owner, _, key = name.rpartition(".")
    return getattr(module.get_submodule(owner), key)


def _saved(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield parameters, and the buffers of a state dict, under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, buffer in owner._buffers.items():
            if buffer is not None and key not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def _match(module: nn.Module, mark: Pretrained) -> dict[str, Stored]:
    """Find the stored value of each parameter and saved buffer of a whole module, by first name.
    Adapters are left out."""
    plain = {name: plain_name(module, name) for name, _ in _saved(module)}
    known = {name for name in plain.values() if name is not None}
    available, unexpected = _available(module, read_tensors(mark.folder), known)
    tied: dict[int, list[str]] = {}
    for name, tensor in _saved(module):
        if plain[name] is not None:
            tied.setdefault(id(tensor), []).append(name)
    found: dict[str, Stored] = {}
    missing = []
    for names in tied.values():
        stored = tuple(
            available[name]
            for name in dict.fromkeys(str(plain[name]) for name in names)
            if name in available
        )
        if stored:
            found[names[0]] = stored
        elif not may_be_missing(module, str(plain[names[0]])):
            missing.append(str(plain[names[0]]))
    if mark.strict and (missing or unexpected):
        raise _other_names(module, mark.folder, missing, unexpected)
    shapes = {name: tuple(_tensor(module, name).shape) for name in found}
    refuse_shapes(
        {name: (shape, stored.shape) for name, shape in shapes.items() for stored in found[name]},
        mark.folder,
    )
    _require_floats(
        {
            name: stored
            for name, stored in found.items()
            if _tensor(module, name).is_floating_point()
        }
    )
    return found


def _available(
    module: nn.Module, tensors: Mapping[str, StoredTensor], known: set[str]
) -> tuple[dict[str, StoredValue], list[str]]:
    """Return the stored values by name in the module, and the names of stored tensors that it does
    not have."""
    if not is_transformers_model(module):
        available = {
            name: StoredValue.of(tensor) for name, tensor in tensors.items() if name in known
        }
        return available, [name for name in tensors if name not in known]
    available, unexpected = {}, []
    parts: dict[str, tuple[Tiling, dict[str, list[StoredTensor]]]] = {}
    for name, (new, made) in renamed(module, tensors, known).items():
        if new not in known:
            unexpected += [] if may_be_left_over(module, new) else [name]
        elif made is None:
            available[new] = StoredValue.of(tensors[name])
        elif made.tiling is None:
            folder = tensors[name].file.parent
            raise CheckpointError(
                f"{folder} stores '{name}' in a different form from '{new}' of"
                f" {type(module).__name__} (Transformers applies {made.operations}). So slices of"
                " it cannot be read. Convert it once:"
                f" from_pretrained('{folder}').save_pretrained(PATH, save_original_format=False)."
            )
        else:
            columns = parts.setdefault(
                new, (Tiling(*made.tiling), {pattern: [] for pattern in made.patterns})
            )[1]
            columns[made.pattern].append(tensors[name])
    return (
        available | {name: tiling.tile(name, columns) for name, (tiling, columns) in parts.items()},
        unexpected,
    )


def _require_floats(found: Mapping[str, Stored]) -> None:
    for name, stored in found.items():
        for tensor in (tensor for value in stored for tensor in value.tensors):
            if tensor.dtype not in FLOATS:
                raise CheckpointError(
                    f"'{name}' is stored as {tensor.dtype} in {tensor.file}; only {listed(FLOATS)}"
                    " can be trained. Use the weights of the model before it was quantized."
                )


def _other_names(
    module: nn.Module, folder: Path, missing: list[str], unexpected: list[str]
) -> CheckpointError:
    lists = (
        (missing, "the model has and the files lack"),
        (unexpected, "the files have and the model lacks"),
    )
    parts = [
        f"{len(names)} that {what} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for names, what in lists
        if names
    ]
    return CheckpointError(
        f"The tensors in {folder} do not match {type(module).__name__}: {'; '.join(parts)}. Use the"
        " folder of this model, or load_pretrained(..., strict=False) to initialize missing"
        " tensors and ignore extra ones."
    )
