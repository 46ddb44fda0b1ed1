"""Commands of other programs that tokenize, for `tokenizing.py`: `tokenizing_worker.py
megatron|datatrove FOLDER ARGUMENTS...`.

Both do all of their own work. Replaced or left out is only this:

- Megatron (`tools/preprocess_data.py`): the `__init__` of `megatron.core`, `megatron.training` and
  `megatron.training.config`, which import what a machine without a GPU lacks (Triton), and
  `megatron.training.arguments`, which imports them again. The script takes one function from the
  latter, the options of the tokenizer; they have the defaults of its own `TokenizerConfig`. So its
  start is shorter here.
- datatrove: `MegatronDocumentTokenizer` without its steps that shuffle and merge files. Its
  processes are forked, not made by its default "forkserver": they start sooner, and the processor
  time is that of a child of this command.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from types import ModuleType

_BARE = ("megatron.core", "megatron.training", "megatron.training.config")


def megatron(folder: Path, arguments: list[str]) -> None:
    """Run its `tools/preprocess_data.py`. Without arguments, only import what it needs."""
    sys.path.insert(0, str(folder))
    for name in _BARE:
        package = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    # as its own __init__ does first: its modules import each other
    import_module("megatron.core.parallel_state")
    options = ModuleType("megatron.training.arguments")
    options._add_tokenizer_args = _add_tokenizer_options  # type: ignore[attr-defined]
    sys.modules[options.__name__] = options
    script = str(folder / "tools" / "preprocess_data.py")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__" if arguments else "only_imported")


def _add_tokenizer_options(parser: ArgumentParser) -> ArgumentParser:
    """The two options that we give, and its own defaults of the others."""
    config = import_module("megatron.training.config.training_config").TokenizerConfig
    parser.set_defaults(**vars(config()))
    for name in ("tokenizer_type", "tokenizer_model"):
        if name not in {field.name for field in dataclasses.fields(config)}:
            raise SystemExit(f"This commit of Megatron has no option {name} of tokenizers.")
        parser.add_argument(f"--{name.replace('_', '-')}")
    return parser


def datatrove(folder: Path, arguments: list[str]) -> None:
    """Tokenize a folder of JSON lines, one file for each process: CORPUS TOKENIZER SEPARATOR OUT
    PROCESSES. Without arguments, only import.

    Args:
        folder: of `pip install --target`, searched after the environment.
    """
    sys.path.append(str(folder))
    from datatrove.executor import LocalPipelineExecutor  # type: ignore[import-not-found]
    from datatrove.pipeline.readers import JsonlReader  # type: ignore[import-not-found]
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer  # type: ignore[import-not-found]

    import_module("orjson")  # imported by its reader when it reads
    if not arguments:
        return
    corpus, tokenizer, separator, out, processes = arguments
    steps = [
        JsonlReader(corpus),
        MegatronDocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token=separator),
    ]
    LocalPipelineExecutor(
        steps,
        tasks=int(processes),
        workers=int(processes),
        logging_dir=f"{out}/logs",
        start_method="fork",
    ).run()


if __name__ == "__main__":
    {"megatron": megatron, "datatrove": datatrove}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:])
