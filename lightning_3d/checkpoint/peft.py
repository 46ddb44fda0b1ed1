"""The adapters of a checkpoint in PEFT's own format, and its model's tensors with the adapters
merged. Only one layer is in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.checkpoint.reading import TensorFolder
from lightning_3d.checkpoint.safetensors_stream import SafetensorsStream
from lightning_3d.compat.peft import (
    WEIGHTS,
    adapter_form,
    merged,
    merging_layers,
    stored_names,
    write_config,
)
from lightning_3d.errors import CheckpointError, ConfigError, listed


def write_adapters(
    folder: TensorFolder,
    prefix: str,
    model: Any,
    described: Mapping[str, Mapping[str, Any]],
    dtype: torch.dtype | None,
    output: Path,
) -> tuple[int, int, int]:
    """Write the adapter "default" into `output`, others into folders of their names in it.

    Args:
        prefix: of the model's tensors in the checkpoint. model: on meta, with its adapters.

    Returns:
        The numbers of files, tensors and bytes.
    """
    shapes = folder.names(prefix)
    meta = {
        name: torch.empty(shape, dtype=folder.dtype(prefix + name), device="meta")
        for name, shape in shapes.items()
    }
    files = tensors = nbytes = 0
    for adapter, given in described.items():
        where = output if adapter == "default" else output / adapter
        where.mkdir(exist_ok=True)
        sources = adapter_form(model, adapter, meta)
        types = {
            key: dtype if dtype and meta[name].is_floating_point() else meta[name].dtype
            for key, name in sources.items()
        }
        with SafetensorsStream(
            where / WEIGHTS, {key: (shapes[name], types[key]) for key, name in sources.items()}
        ) as stream:
            for key, name in sources.items():
                stream.write(key, folder.read(prefix + name).to(types[key]))
        write_config(model, given, where)
        files, tensors = files + 1, tensors + len(sources)
        nbytes += sum(meta[name].numel() * types[key].itemsize for key, name in sources.items())
    return files, tensors, nbytes


class MergedFolder:
    """The tensors that a checkpoint's model would have after `merge_and_unload`; read as those of a
    `TensorFolder`.

    Args:
        prefix: of the model's tensors in the checkpoint. model: on meta, with its adapters. plain:
            the same without.

    Raises:
        ConfigError: there are several adapters. CheckpointError: a layer cannot be merged by
            itself.
    """

    def __init__(
        self,
        folder: TensorFolder,
        prefix: str,
        model: nn.Module,
        plain: nn.Module,
        described: Mapping[str, Any],
    ) -> None:
        if len(described) != 1:
            raise ConfigError(
                f"--merge merges a single adapter, but the model has {listed(sorted(described))}."
                " Export without --merge."
            )
        [self._adapter] = described
        self._folder, self._prefix = folder, prefix
        self._layers = merging_layers(model)
        saved = folder.names(prefix)
        self._stored = {
            name: source
            for name, source in stored_names(model, self._adapter).items()
            if source in saved
        }
        self._last: tuple[str, dict[str, Tensor]] = "", {}
        state = plain.state_dict(keep_vars=True)
        uses = Counter(map(id, state.values()))
        tied = next(
            (
                name
                for name, tensor in state.items()
                if uses[id(tensor)] > 1 and name.rpartition(".")[0] in self._layers
            ),
            None,
        )
        if tied is not None:
            raise CheckpointError(
                f"The adapter of {tied} cannot be merged: another layer uses the same weight, and"
                " merging would change both. Export without --merge."
            )

    def names(self, prefix: str) -> dict[str, tuple[int, ...]]:
        shapes = self._folder.names(prefix)
        return {name: shapes[source] for name, source in self._stored.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._folder.dtype(self._prefix + self._stored[name.removeprefix(self._prefix)])

    def read(self, name: str) -> Tensor:
        plain = name.removeprefix(self._prefix)
        layer, _, key = plain.rpartition(".")
        if layer not in self._layers:
            return self._folder.read(self._prefix + self._stored[plain])
        if self._last[0] != layer:  # its bias comes next
            state = merged(
                self._layers[layer],
                self._adapter,
                lambda inner: self._folder.read(f"{self._prefix}{layer}.{inner}"),
            )
            self._last = layer, state
        return self._last[1][key]
