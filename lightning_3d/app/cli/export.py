"""`lightning-3d export`: write the model of a checkpoint in the format of Transformers. torch is
imported after all checks."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning_3d.app.cli.find_checkpoint import (
    AVERAGE,
    CHECKPOINT,
    NO_VERIFY,
    find_checkpoint,
    require_average,
)
from lightning_3d.app.cli.options import Command
from lightning_3d.app.runs.checkpoints import run_configuration
from lightning_3d.errors import ConfigError, plural
from lightning_3d.ranks.progress import task
from lightning_3d.storage.numbers import show_bytes
from lightning_3d.storage.remote_path import Place, RemotePath

DTYPES = ("bfloat16", "float16", "float32", "float64")

COMMAND = Command(
    "export",
    "Write the model of a checkpoint in the format of Transformers: config.json, safetensors files,"
    " their index, and the tokenizer. AutoModelForCausalLM.from_pretrained loads it. Holds one"
    " tensor at a time in memory.",
    takes="",
    examples=["outputs/run --output my-model --dtype bfloat16"],
)
COMMAND.argument("CHECKPOINT", CHECKPOINT)
COMMAND.choice("--to", "FORMAT", ["huggingface"], "format of the files", default="huggingface")
COMMAND.option(
    "--output", "FOLDER", "folder to write, on the local disk; default: CHECKPOINT-huggingface"
)
COMMAND.choice(
    "--dtype", "DTYPE", DTYPES, "type of the weights", unset="the type in which they were trained"
)
COMMAND.option("--max-shard-size", "SIZE", "largest size of one file; default: 5GB", default="5GB")
COMMAND.option(
    "--tokenizer",
    "FOLDER",
    "folder of the tokenizer to copy; default: the tokenizer that the run started from",
)
COMMAND.flag("--merge", "merge PEFT adapters into the model; default: write the adapters alone")
COMMAND.option("--module", "NAME", "name of the model, if the checkpoint holds several")
COMMAND.flag("--average", AVERAGE)
COMMAND.flag("--no-verify", NO_VERIFY)


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    return COMMAND.run(arguments, lambda options, _: _export(options))


def _export(options: Namespace) -> int:
    path = find_checkpoint(options.checkpoint)
    if options.average:
        require_average(path)
    tokenizer = (
        Path(options.tokenizer).expanduser() if options.tokenizer else _tokenizer_of_run(path)
    )
    if options.tokenizer and not Path(options.tokenizer).expanduser().is_dir():
        raise ConfigError(
            "--tokenizer must be a folder with a tokenizer of Transformers; there is no folder"
            f" {options.tokenizer}."
        )
    default_folder = Path.cwd() if isinstance(path, RemotePath) else path.parent
    output = (
        Path(options.output).expanduser().absolute()
        if options.output
        else default_folder / f"{path.name}-huggingface"
    )

    with task("importing torch and Transformers"):
        import torch

        from lightning_3d.checkpoint.huggingface import export

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
        average=options.average,
    )
    words = (
        "with its tokenizer"
        if found.tokenizer
        else "without a tokenizer (--tokenizer FOLDER adds one)"
    )
    files = "1 file" if found.files == 1 else f"{found.files} files"
    what = "PEFT adapters, " if found.adapters else ""
    if found.mtp_layers:
        what = (
            f"with {plural(found.mtp_layers, 'module')} of multi-token prediction, which"
            " generate(..., use_mtp=True) reads: "
        )
    print(
        f"{output}: {what}{found.tensors} tensors, {show_bytes(found.nbytes)} in {files}, {words}"
    )
    return 0


def _tokenizer_of_run(path: Place) -> Path | None:
    """Find the folder of the tokenizer, or of the pretrained model, in the configuration of the run
    that wrote a checkpoint."""
    try:
        config: Any = run_configuration(path) or {}
    except (OSError, ValueError, AttributeError):
        # no checkpoint, or a damaged one, which the export explains
        return None
    named = [
        (config.get("data") or {}).get("tokenizer"),
        (config.get("model") or {}).get("pretrained"),
    ]
    return next((Path(name) for name in named if name and any(Path(name).glob("tokenizer*"))), None)
