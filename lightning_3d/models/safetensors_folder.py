"""A folder of pretrained weights in Transformers' format, read without torch.

    config.json                         the architecture
    model.safetensors                   all tensors, or
    model.safetensors.index.json        tensor -> file, next to model-00001-of-00004.safetensors, ...

The header of a safetensors file is JSON, so names, shapes and types of all tensors are known before
anything is started, and truncated files are noticed. Pickles are never loaded.
"""  # noqa: E501

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lightning_3d.errors import CheckpointError, listed, plural
from lightning_3d.storage.json_file import parse_json, read_text

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
WIDTHS = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
FLOATS = ("F64", "F32", "F16", "BF16")
CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M;'
    " M.from_pretrained('{0}').save_pretrained('{0}-safetensors')\""
)
_LARGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. `dtype` has safetensors' names: F32, BF16, ..."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


def find_folder(path: str | os.PathLike[str]) -> Path:
    """Find a folder: `path` itself, or the folder of a Hugging Face hub model in the local cache.
    Nothing is downloaded.

    Raises:
        CheckpointError: no such folder, and no such model in the cache.
    """
    try:
        folder = Path(path).expanduser()
        is_folder, is_file = folder.is_dir(), folder.exists()
    except (OSError, ValueError, RuntimeError) as error:  # no name that a file can have
        raise CheckpointError(
            f"{str(path)[:200]!r} cannot be a folder with pretrained weights: {error.args[-1]}."
        ) from None
    if is_folder:
        return folder.absolute()
    if is_file:
        raise CheckpointError(f"{path} is a file. Use the folder with {CONFIG} and {SINGLE}.")
    name = str(path)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise CheckpointError(f"There is no folder {path} to read pretrained weights from.")
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True)).absolute()
    except (OSError, ValueError):
        raise CheckpointError(
            f"There is no folder {name}, and no model of this name in the cache"
            f" {constants.HF_HUB_CACHE}. Ranks do not download models. Run `hf download {name}` on"
            " every node first, or use a folder that all nodes can read."
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    """Read the fields of `config.json`.

    Raises:
        CheckpointError: the file is missing or not a JSON object.
    """
    try:
        config = parse_json(read_text(folder / CONFIG))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {CONFIG}.{_what_it_is(folder)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} cannot be read as JSON: {error}. Copy or download it again."
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{folder / CONFIG} does not contain a JSON object. Copy or download it again."
        )
    return config


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Read the headers of all tensors in the folder, by name.

    Raises:
        CheckpointError: no safetensors files, missing files or tensors that the index names, or a
            damaged file.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}.{_what_it_is(folder)}")
    places = _read_index(folder / INDEX)
    files = sorted(set(places.values()))
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of the {plural(len(files), 'file')} that {INDEX} names:"
            f" {_some(absent)}. Copy or download them again."
        )
    headers = {name: read_header(folder / name) for name in files}
    lost = [f"'{name}' ({file})" for name, file in places.items() if name not in headers[file]]
    if lost:
        raise CheckpointError(
            f"{folder / INDEX} lists {plural(len(lost), 'tensor')} that its files lack:"
            f" {_some(lost)}. Copy or download them again."
        )
    return {name: headers[file][name] for name, file in places.items()}


def _read_index(file: Path) -> dict[str, str]:
    try:
        places = parse_json(read_text(file))["weight_map"]
        if all(
            isinstance(name, str) and Path(name).name == name and len(name.encode()) < 256
            for name in places.values()
        ):
            return dict(places)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(
        f"{file} is damaged: it has no weight_map from tensors to files in its folder. Copy or"
        " download it again."
    )


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: not a safetensors file, or another size than its header describes.
    """
    size, length, text = _header_text(file)
    try:
        header = parse_json(text)
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
        }
        ranges = {
            name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise _damaged(file, "its header is not that of a safetensors file") from None
    described = 8 + length + max((end for _, end in ranges.values()), default=0)
    if described != size:
        raise _damaged(file, f"its header describes {described} bytes, but the file has {size}")
    for name, (begin, end) in ranges.items():
        stored = tensors[name]
        if stored.dtype in WIDTHS and end - begin != prod(stored.shape) * WIDTHS[stored.dtype]:
            raise _damaged(
                file,
                f"{end - begin} bytes cannot hold a {stored.dtype} tensor of shape"
                f" {list(stored.shape)} ('{name}')",
            )
    return tensors


def _header_text(file: Path) -> tuple[int, int, bytes]:
    """Return (bytes of the file, bytes of its header, the header)."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            text = stream.read(length) if length <= min(size - 8, _LARGEST_HEADER) else None
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror}. Copy or download it again."
        ) from error
    if text is not None:
        return size, length, text
    if _LFS.startswith(start) and start:
        raise CheckpointError(
            f"{file} is a Git LFS pointer, not the file itself. Run `git lfs pull` in"
            f" {file.parent}."
        )
    raise _damaged(
        file,
        f"its first 8 bytes announce a header of {length} bytes, but the whole file has {size}",
    )


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is truncated or damaged: {why}. Copy or download it again.")


def _what_it_is(folder: Path) -> str:
    """Describe a folder without weights in the right format, and what to do with it."""
    names = sorted(path.name for path in folder.iterdir())
    pickles = [
        name
        for name in names
        if name.endswith((".bin", ".pth", ".pt")) and ("model" in name or "consolidated" in name)
    ]
    if "manifest.json" in names and ".metadata" in names:
        return " It is a checkpoint of lightning_3d: resume it with trainer.resume= or ckpt_path=."
    if "adapter_config.json" in names:
        return " It contains PEFT adapters; use the folder of the model that they were trained on."
    if CONFIG in names and pickles:
        convert = CONVERT.format(folder)
        return (
            f" {pickles[0]} is a pickle, which can run any code when loaded, so it is not loaded."
            f" If you trust it, convert it: {convert}"
        )
    if pickles:
        return (
            f" {_some(pickles)} is not in Transformers' format; convert it with Transformers'"
            " script for its model."
        )
    return f" It contains {_some(names)}." if names else " It is empty."


def _some(names: list[str]) -> str:
    return listed([*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names)
