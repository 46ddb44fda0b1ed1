"""`lightning-3d export`, `import` and `inspect`: what can be done with a checkpoint without training. torch is imported late."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.cli.exit_codes import guarded
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.storage.checkpoint_names import MANIFEST, checkpoints_in
from lightning_3d.storage.remote_path import Place, RemotePath, place

DTYPES = ("bfloat16", "float16", "float32", "float64")


def export(arguments: list[str]) -> int:
    """Run `lightning-3d export` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="lightning-3d export",
        description="Write the model of a checkpoint in the format of Transformers: config.json, safetensors files, their index, and the"
        " tokenizer. AutoModelForCausalLM.from_pretrained loads it. One tensor at a time is in memory.",
    )
    parser.add_argument("checkpoint", help="a checkpoint, or a run folder, whose newest one is taken")
    parser.add_argument("--to", choices=["huggingface"], default="huggingface", help="the format")
    parser.add_argument("--output", metavar="FOLDER", help="where to, on the local disk; default: CHECKPOINT-huggingface")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as they were trained")
    parser.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of one file; default: 5GB")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="whose tokenizer is copied; default: the one that the run began from")
    parser.add_argument("--merge", action="store_true", help="merge adapters of PEFT into the model; default: write the adapters alone")
    parser.add_argument("--module", metavar="NAME", help="of the model, where a checkpoint holds several")
    _add_no_verify(parser)
    return _guarded(parser, arguments, _export)


def inspect(arguments: list[str]) -> int:
    """Run `lightning-3d inspect` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="lightning-3d inspect",
        description="Show what a checkpoint holds: step, layout that wrote it, tensors, sizes, and whether it is whole.",
    )
    parser.add_argument("checkpoint", help="a checkpoint, or a run folder, whose newest one is taken")
    parser.add_argument("--tensors", action="store_true", help="list every tensor with its type and shape")
    _add_no_verify(parser)
    return _guarded(parser, arguments, _inspect)


def convert(arguments: list[str]) -> int:
    """Run `lightning-3d import` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="lightning-3d import",
        description="Convert the checkpoint of another program into one that every layout loads: a checkpoint file of Lightning (one"
        " process, DDP, FSDP), a sharded folder of its FSDPStrategy, a folder of DeepSpeed (ZeRO 0 to 3). No code in it is run. Weights,"
        " the optimizer's state by the names of parameters, the step, schedulers and the position in the data are carried over.",
    )
    parser.add_argument("source", help="the checkpoint")
    parser.add_argument("--output", metavar="FOLDER", required=True, help="the new checkpoint, a path or a URL")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer out")
    parser.add_argument("--plain-only", action="store_true", help="leave out what asks for classes, instead of refusing the file")
    parser.add_argument("--groups", metavar="FILE", help="JSON: for each parameter group of the optimizer the names of its parameters")
    parser.add_argument("--rename", metavar="OLD=NEW", help='names that begin with OLD begin with NEW: "module.=", or "=model." for all')
    return _guarded(parser, arguments, _convert)


def _add_no_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-verify", action="store_true", help="do not compare the files with their hashes: that reads all of them")


def _guarded(parser: argparse.ArgumentParser, arguments: list[str], action: Callable[[argparse.Namespace], None]) -> int:
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)

    def act() -> int:
        action(options)
        return 0

    return guarded(act, told=(OSError,))


def find_checkpoint(given: str) -> Place:
    """The checkpoint that `given` names: itself, or the newest complete one in a run folder, or below a URL.

    Raises:
        CheckpointError: there is none.
    """
    from lightning_3d.runs.folder import newest_checkpoint

    path = place(given if "://" in given else Path(given).expanduser())
    if isinstance(path, RemotePath):
        found = [] if (path / MANIFEST).is_file() else checkpoints_in(path)
        return found[0] if found else path
    if (path / "config.yaml").is_file() and not (path / "manifest.json").is_file():
        newest = newest_checkpoint(path)
        if newest is None:
            raise CheckpointError(f"The run folder {path} holds no complete checkpoint.")
        return place(newest)
    return path


def _export(options: argparse.Namespace) -> None:
    path = find_checkpoint(options.checkpoint)
    tokenizer = Path(options.tokenizer).expanduser() if options.tokenizer else _tokenizer_of_run(path)
    if options.tokenizer and not Path(options.tokenizer).expanduser().is_dir():
        raise ConfigError(f"There is no folder {options.tokenizer}. --tokenizer is a folder with a tokenizer in Transformers' format.")
    beside = Path.cwd() if isinstance(path, RemotePath) else path.parent
    output = Path(options.output).expanduser().absolute() if options.output else beside / f"{path.name}-huggingface"

    import torch

    from lightning_3d.checkpoint.huggingface import export
    from lightning_3d.checkpoint.inspection import in_bytes

    dtype = getattr(torch, options.dtype) if options.dtype else None
    found = export(
        path,
        output,
        module=options.module,
        dtype=dtype,
        max_shard_size=options.max_shard_size,
        tokenizer=tokenizer,
        merge=options.merge,
        hashes=not options.no_verify,
    )
    words = "with its tokenizer" if found.tokenizer else "without a tokenizer (--tokenizer FOLDER adds one)"
    files = "1 file" if found.files == 1 else f"{found.files} files"
    what = "adapters of PEFT, " if found.adapters else ""
    print(f"{output}: {what}{found.tensors} tensors, {in_bytes(found.nbytes)} in {files}, {words}")


def _tokenizer_of_run(path: Place) -> Path | None:
    """The folder of the tokenizer, or of the pretrained model, that the run of a checkpoint in its run folder used."""
    for folder in path.parents[:2] if isinstance(path, Path) else ():
        if (folder / "config.yaml").is_file():
            config: Any = yaml.safe_load((folder / "config.yaml").read_text())
            named = [(config.get("data") or {}).get("tokenizer"), (config.get("model") or {}).get("pretrained")]
            return next((Path(name) for name in named if name and any(Path(name).glob("tokenizer*"))), None)
    return None


def _convert(options: argparse.Namespace) -> None:
    old, equals, new = (options.rename or "").partition("=")
    if options.rename is not None and not equals:
        raise ConfigError(f'--rename is "{options.rename}"; write OLD=NEW.')
    groups = _read_groups(Path(options.groups)) if options.groups else None

    from lightning_3d.checkpoint.conversion import convert
    from lightning_3d.checkpoint.inspection import in_bytes

    found = convert(
        Path(options.source).expanduser().absolute(),
        options.output,
        groups=groups,
        optimizer=not options.weights_only,
        rename=(old, new) if options.rename is not None else None,
        plain_only=options.plain_only,
    )
    print(f"{options.output}: from {found.kind}, step {found.step}, {found.weights} weights, {found.states} states of the optimizer,")
    print(f"  {in_bytes(found.nbytes)}; any layout loads it")
    for sentence in found.lost:
        print(f"  {sentence}")


def _read_groups(path: Path) -> list[list[str]]:
    try:
        groups = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--groups {path} cannot be read: {error}") from error
    if not isinstance(groups, list) or not all(isinstance(group, list) and all(isinstance(n, str) for n in group) for group in groups):
        raise ConfigError(f"--groups {path} must hold a list of names for each parameter group.")
    return groups


def _inspect(options: argparse.Namespace) -> None:
    path = find_checkpoint(options.checkpoint)

    from lightning_3d.checkpoint.inspection import describe

    for line in describe(path, tensors=options.tensors, hashes=not options.no_verify):
        print(line)
