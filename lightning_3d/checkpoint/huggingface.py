"""Export of a checkpoint's model in the format of Transformers, as `save_pretrained` writes it,
with about one tensor in memory."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

from lightning_3d.checkpoint.folder import contents, read_manifest, verify
from lightning_3d.checkpoint.peft import MergedFolder, write_adapters
from lightning_3d.checkpoint.reading import TensorFolder
from lightning_3d.checkpoint.safetensors_stream import SafetensorsStream
from lightning_3d.checkpoint.state import MODEL, averaged
from lightning_3d.compat.peft import inject
from lightning_3d.compat.transformers import build_on_meta, keeps_float32, stored_form
from lightning_3d.errors import CheckpointError, ConfigError, did_you_mean, listed
from lightning_3d.models.multi_token import predict_ahead
from lightning_3d.ranks.progress import task
from lightning_3d.storage.remote_path import Place

MODELS = "transformers"
"""Key in the manifest: descriptions of Transformers models, by name in the user's module."""

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
)
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Exported:
    """Summary of an export: files with weights, tensors, bytes, whether they are PEFT adapters, and
    how many modules of multi-token prediction are among them."""

    files: int
    tensors: int
    nbytes: int
    tokenizer: bool
    adapters: bool
    mtp_layers: int = 0


def export(
    path: Place,
    output: Path,
    *,
    module: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    tokenizer: Path | None = None,
    merge: bool = False,
    hashes: bool = True,
    average: bool = False,
) -> Exported:
    """Write the model of a checkpoint to the folder `output`, which appears when it is complete.

    For a model with PEFT adapters, write only the adapters, in PEFT's format; with `merge`, the
    whole model with them merged in.

    Args:
        path: checkpoint to export.
        output: folder to create.
        module: the model's name in the user's module; only needed if the module has several models.
        dtype: dtype of the written weights. None: as in the checkpoint.
        max_shard_size: largest size of a file, such as "5GB" (10**9 bytes).
        tokenizer: folder from which tokenizer files are copied. None: no tokenizer.
        merge: whether to merge the adapters into the model.
        hashes: whether to compare all files with their hashes first.
        average: whether to write the average of the weights instead of the weights, by default in
            the type of these.

    Raises:
        CheckpointError: no complete checkpoint, a damaged one, or no model of Transformers in it.
            ConfigError: `output` is taken.
    """
    manifest = read_manifest(path)
    name, described = _choose(manifest, module, path, merge)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} already exists and is not empty. Choose another --output.")
    if hashes:
        verify(path, manifest)
    inside, prefix = contents(path, manifest), MODEL + (f"{name}." if name else "")
    folder = TensorFolder(inside)
    if average:
        dtype = dtype or next(
            (
                kind
                for name in folder.names(prefix)
                if (kind := folder.dtype(prefix + name)).is_floating_point
            ),
            None,
        )
        folder = averaged(inside)
    model = adapted = meta_model(described)
    adapters: Mapping[str, Any] = described.get("adapters") or {}
    if adapters:
        adapted = build_on_meta(described["class"], described["config"])
        inject(adapted, adapters)
    tensors = MergedFolder(folder, prefix, adapted, model, adapters) if merge else folder
    source = StoredForm(tensors, prefix, model, dtype, path) if merge or not adapters else None
    temporary = output.with_name(f".{output.name}.exporting")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if source is None:
            counted = write_adapters(folder, prefix, adapted, adapters, dtype, temporary)
        else:
            found = _write_weights(source, temporary, max_shard_size)
            counted = len(set(found.values())), len(found), source.nbytes
            _write_config(model, source.dtype, temporary)
        copied = _copy_tokenizer(tokenizer, temporary)
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Exported(*counted, copied, source is None, described.get("mtp_layers", 0))


def _choose(
    manifest: Mapping[str, Any], module: str | None, path: Place, merge: bool
) -> tuple[str, Mapping[str, Any]]:
    """Return the model's name in the user's module and its entry in the manifest."""
    models: dict[str, Any] = manifest.get(MODELS, {})
    if not models:
        raise CheckpointError(
            f"{path} has no Transformers model. Use load_full_state_dict to read its weights."
        )
    if module is None and len(models) > 1:
        raise ConfigError(
            f"{path} has several models: {listed(sorted(models))}. Choose one with --module NAME."
        )
    name = module if module is not None else next(iter(models))
    if name not in models:
        raise ConfigError(
            f'{path} has no model "{name}".{did_you_mean(name, models)} It has'
            f" {listed(sorted(models))}."
        )
    if merge and not models[name].get("adapters"):
        raise ConfigError(
            f"The model in {path} has no PEFT adapters, so there is nothing to merge. Export"
            " without --merge."
        )
    if models[name].get("adapted") and not models[name].get("adapters"):
        raise CheckpointError(
            f"{path} does not describe the PEFT adapters of its model. Load it on one process with"
            " load_full_state_dict, and use save_pretrained or merge_and_unload there."
        )
    return name, models[name]


class Tensors(Protocol):
    """Whole tensors by name, of a checkpoint or of the ranks of a run."""

    def names(self, prefix: str) -> dict[str, tuple[int, ...]]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def read(self, name: str) -> Tensor: ...


class StoredForm:
    """Tensors that Transformers would save, converted one at a time.

    Args:
        folder: tensors as the model has them.
        prefix: prefix of their names there.
        model: the model, on meta.
        dtype: type of the floating-point ones; None keeps theirs.
        path: place of the tensors, for messages.

    Attributes:
        tensors: shape and dtype of each tensor, in order.
        dtype: dtype of the parameters, for the configuration.
    """

    def __init__(
        self, folder: Tensors, prefix: str, model: Any, dtype: torch.dtype | None, path: object
    ) -> None:
        self._folder, self._prefix, self._model, self._dtype = folder, prefix, model, dtype
        shapes = folder.names(prefix)
        expected = {name: tuple(tensor.shape) for name, tensor in _untied(model).items()}
        if shapes != expected:
            wrong = sorted(
                name
                for name in shapes.keys() | expected.keys()
                if shapes.get(name) != expected.get(name)
            )
            raise CheckpointError(
                f"The weights in {path} do not match {type(model).__name__}. Tensors that are"
                f" missing, unknown or of another shape: {listed(wrong[:3])}. Use"
                " load_full_state_dict to read the weights."
            )
        meta = {
            name: torch.empty(shapes[name], dtype=self._type(name), device="meta")
            for name in expected
        }
        self._groups, self.tensors = _groups(model, meta)
        self.dtype = next(tensor.dtype for tensor in meta.values() if tensor.is_floating_point())

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in self.tensors.values())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for names in self._groups:
            read = {
                name: self._folder.read(self._prefix + name).to(self._type(name)) for name in names
            }
            yield from stored_form(self._model, read).items()

    def _type(self, name: str) -> torch.dtype:
        stored = self._folder.dtype(self._prefix + name)
        convert = (
            self._dtype is not None
            and stored.is_floating_point
            and not keeps_float32(self._model, name)
        )
        return self._dtype if convert and self._dtype is not None else stored


def meta_model(described: Mapping[str, Any]) -> Any:
    """Build a model that `describe_models` has described on the meta device, without its
    adapters."""
    model = build_on_meta(described["class"], described["config"])
    if described.get("mtp_layers"):
        with torch.device("meta"):
            predict_ahead(model, described["mtp_layers"])
    return model


def _untied(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with each tied parameter only once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            found[name] = tensor
        seen.add(id(tensor))
    return found


def _groups(
    model: Any, meta: Mapping[str, Tensor]
) -> tuple[list[tuple[str, ...]], dict[str, Tensor]]:
    """Find which tensors of the model are needed together to make which stored ones.

    Nearly always that is one for one, or one for several (experts). Where a tensor alone does not
    give what it gives among the others, all such are kept together.
    """
    whole = stored_form(model, dict(meta))
    alone = {name: stored_form(model, {name: tensor}) for name, tensor in meta.items()}
    makers: dict[str, int] = {}
    for made in alone.values():
        for key in made:
            makers[key] = makers.get(key, 0) + 1
    together = tuple(
        name
        for name, made in alone.items()
        if any(
            makers[key] > 1 or key not in whole or whole[key].shape != tensor.shape
            for key, tensor in made.items()
        )
    )
    groups = [(name,) for name in meta if name not in together] + ([together] if together else [])
    tensors = {
        key: tensor
        for names in groups
        for key, tensor in stored_form(model, {name: meta[name] for name in names}).items()
    }
    if tensors.keys() != whole.keys():
        raise CheckpointError(
            f"A {type(model).__name__} cannot be exported one tensor at a time, because"
            " Transformers combines several tensors when it saves one. Load it on one process with"
            " load_full_state_dict, and use save_pretrained there."
        )
    return groups, tensors


def _write_weights(source: StoredForm, folder: Path, max_shard_size: str) -> dict[str, str]:
    """Write the files, and the index where there are several. Returns the file of each tensor."""
    try:
        split = split_torch_state_dict_into_shards(source.tensors, max_shard_size=max_shard_size)
    except ValueError:
        raise ConfigError(
            "--max-shard-size must be a number with a unit, for example 5GB or 500MB; got"
            f' "{max_shard_size}".'
        ) from None
    files = split.filename_to_tensors
    places = {name: file for file, names in files.items() for name in names}
    # a tensor that fills a file alone comes between those of another one
    with contextlib.ExitStack() as opened:
        streams = {
            file: opened.enter_context(
                SafetensorsStream(
                    folder / file,
                    {
                        name: (tuple(source.tensors[name].shape), source.tensors[name].dtype)
                        for name in names
                    },
                )
            )
            for file, names in files.items()
        }
        with task("writing tensors", source.nbytes, "B") as advance:
            for name, tensor in source:
                streams[places[name]].write(name, tensor)
                advance(tensor.nbytes)
    if split.is_sharded:
        index = {
            "metadata": {"total_size": source.nbytes},
            "weight_map": dict(sorted(places.items())),
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return places


def _write_config(model: Any, dtype: torch.dtype, folder: Path) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _copy_tokenizer(tokenizer: Path | None, folder: Path) -> bool:
    if tokenizer is None:
        return False
    files = {
        file for pattern in TOKENIZER_FILES for file in tokenizer.glob(pattern) if file.is_file()
    }
    if not files:
        raise ConfigError(
            f"{tokenizer} contains no tokenizer files. Pass a folder that save_pretrained of the"
            " tokenizer wrote."
        )
    for file in files:
        shutil.copy(file, folder)
    return True
