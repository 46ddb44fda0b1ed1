"""`lightning-3d export` and `lightning-3d inspect`: what can be done with a checkpoint without training. torch is imported late."""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.errors import CheckpointError, ConfigError, Lightning3DError

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
    parser.add_argument("--output", metavar="FOLDER", help="where to; default: CHECKPOINT-huggingface")
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


def _add_no_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-verify", action="store_true", help="do not compare the files with their hashes: that reads all of them")


def _guarded(parser: argparse.ArgumentParser, arguments: list[str], action: Callable[[argparse.Namespace], None]) -> int:
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        action(options)
    except Lightning3DError as error:
        print(f"lightning_3d: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        print(f"lightning_3d: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def find_checkpoint(given: str) -> Path:
    """The checkpoint that `given` names: itself, or the newest complete one in a run folder.

    Raises:
        CheckpointError: there is none.
    """
    from lightning_3d.run_folder import newest_checkpoint

    path = Path(given).expanduser().absolute()
    if (path / "config.yaml").is_file() and not (path / "manifest.json").is_file():
        found = newest_checkpoint(path)
        if found is None:
            raise CheckpointError(f"The run folder {path} holds no complete checkpoint.")
        return Path(found)
    return path


def _export(options: argparse.Namespace) -> None:
    path = find_checkpoint(options.checkpoint)
    tokenizer = Path(options.tokenizer).expanduser() if options.tokenizer else _tokenizer_of_run(path)
    if options.tokenizer and not Path(options.tokenizer).expanduser().is_dir():
        raise ConfigError(f"There is no folder {options.tokenizer}. --tokenizer is a folder with a tokenizer in Transformers' format.")
    output = Path(options.output).expanduser().absolute() if options.output else path.with_name(f"{path.name}-huggingface")

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


def _tokenizer_of_run(path: Path) -> Path | None:
    """The folder of the tokenizer, or of the pretrained model, that the run of a checkpoint in its run folder used."""
    for folder in path.parents[:2]:
        if (folder / "config.yaml").is_file():
            config: Any = yaml.safe_load((folder / "config.yaml").read_text())
            named = [(config.get("data") or {}).get("tokenizer"), (config.get("model") or {}).get("pretrained")]
            return next((Path(name) for name in named if name and any(Path(name).glob("tokenizer*"))), None)
    return None


def _inspect(options: argparse.Namespace) -> None:
    path = find_checkpoint(options.checkpoint)

    from lightning_3d.checkpoint.inspection import describe

    for line in describe(path, tensors=options.tensors, hashes=not options.no_verify):
        print(line)
