"""Description of a checkpoint's contents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import prod

from lightning_3d.checkpoint.folder import contents, files_of, read_manifest, verify
from lightning_3d.checkpoint.huggingface import MODELS
from lightning_3d.checkpoint.reading import TensorFolder
from lightning_3d.checkpoint.state import AVERAGE, CURRENT, MODEL, OPTIMIZER
from lightning_3d.errors import listed
from lightning_3d.storage.numbers import show_bytes
from lightning_3d.storage.remote_path import Place


def describe(path: Place, *, tensors: bool = False, hashes: bool = True) -> Iterator[str]:
    """Describe the checkpoint at `path` in lines of text, of which the last reports that it is
    complete and undamaged.

    Args:
        tensors: whether to add a line for each tensor.
        hashes: whether to compare all files with their hashes, not only with their sizes.

    Raises:
        CheckpointError: the checkpoint does not exist, was never finished, or is damaged.
    """
    manifest = read_manifest(path)
    folder = TensorFolder(contents(path, manifest))
    yield f"{path}"
    yield f"  step        {manifest.get('global_step', '?')}, epoch {manifest.get('epoch', '?')}"
    if "source" in manifest:
        yield f"  made from   {manifest['source']}; any layout loads it"
    else:
        known = {
            key: manifest.get(key, "?") for key in ("layout", "schedule", "zero_stage", "precision")
        }
        writer = "{layout}, {schedule}, ZeRO-{zero_stage}, precision {precision}".format(**known)
        yield f"  written by  {writer}; any layout loads it"
    for name, model in manifest.get(MODELS, {}).items():
        yield f"  model       {model['class']}{f' ({name})' if name else ''}"
    kinds = {"weights": MODEL, "optimizer": OPTIMIZER, "averaging": CURRENT, "average": AVERAGE}
    for kind, prefix in kinds.items():
        shapes = folder.names(prefix)
        if not shapes:
            continue
        types = sorted({str(folder.dtype(prefix + name)).removeprefix("torch.") for name in shapes})
        size = sum(
            prod(shape) * folder.dtype(prefix + name).itemsize for name, shape in shapes.items()
        )
        numbers = f", {sum(map(prod, shapes.values())):,} numbers" if kind == "weights" else ""
        yield f"  {kind:<11} {len(shapes)} tensors{numbers}, {listed(types)}, {show_bytes(size)}"
        if tensors:
            width = max(map(len, shapes))
            for name, shape in shapes.items():
                yield (
                    f"    {name:<{width}} "
                    f" {str(folder.dtype(prefix + name)).removeprefix('torch.'):<9} {list(shape)}"
                )
    if not manifest.get("optimizer_state"):
        yield "  optimizer   none: weights only"
    yield (
        f"  files       {len(manifest['files'])},"
        f" {show_bytes(sum(known.bytes for known in files_of(manifest).values()))}"
    )
    started = time.monotonic()
    if hashes:
        verify(path, manifest)
    compared = (
        f"every file matches its hash ({time.monotonic() - started:.1f} s)"
        if hashes
        else "every file has the recorded size"
    )
    yield f"  complete    yes: {compared}"
