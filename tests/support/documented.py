"""What README.md and docs/*.md show: blocks of code, the commands in them, and how a command line
is checked without being run.

A block is fenced and names its language: `python`, `yaml`, `bash` (commands), `console` (commands
after `$ `, and what they print), or `text`, which is nothing to run. A comment right above it may
say more:

    <!-- needs: cluster -->        it cannot run on a machine without a cluster (GPU, network); it is checked all the same
    <!-- given: module, loader; ranks: 8 -->   names that a Python block takes from `documented_names.py`, and on how many ranks it runs
    <!-- file: mine.py -->         the block is this file, which commands may name
"""  # noqa: E501

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from command_line import REPOSITORY

LANGUAGES = ("python", "yaml", "bash", "console", "text", "mermaid")
NEEDS = ("cluster", "GPU", "network")
NOTES = ("needs", "given", "ranks", "file")
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        notes: of the comment above it.
    """

    page: str
    line: int
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def given(self) -> list[str]:
        return [name.strip() for name in self.notes.get("given", "").split(",") if name.strip()]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    lines, found, start = page.read_text("utf-8").splitlines(), [], None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        above = re.fullmatch(r"<!-- (.*) -->", lines[start - 1]) if start else None
        notes = (
            dict(part.strip().split(": ", 1) for part in above[1].split(";"))
            if above and ": " in above[1]
            else {}
        )
        text = "\n".join(lines[start + 1 : number]) + "\n"
        found.append(
            Block(page.relative_to(REPOSITORY).as_posix(), start + 1, lines[start][3:], text, notes)
        )
        start = None
    assert start is None, f"{page}:{start}: a block has no end"
    return found


ALL = [block for page in PAGES for block in blocks(page)]
FILES = {block.notes["file"]: block.text for block in ALL if "file" in block.notes}


def unfenced(page: Path) -> list[int]:
    """Lines of indented code, which would be in no block."""
    lines, inside, found = page.read_text("utf-8").splitlines(), False, []
    for number, line in enumerate(lines):
        inside ^= line.startswith("```")
        if not inside and line.startswith("    ") and not lines[number - 1].strip():
            found.append(number + 1)
    return found


@dataclass(frozen=True)
class Command:
    """A command line of a block, without what it is piped into.

    Attributes:
        output: what it is shown to print, in a `console` block.
    """

    block: Block
    words: list[str]
    output: str = ""

    @property
    def name(self) -> str:
        return f"{self.block.place} {shlex.join(self.words)}"


def commands(block: Block) -> list[Command]:
    """The command lines of a block."""
    if block.language == "console":
        shown = [part.partition("\n") for part in ("\n" + block.text).split("\n$ ")[1:]]
        return [Command(block, shlex.split(line), output.strip("\n")) for line, _, output in shown]
    if block.language != "bash":
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    return [
        Command(block, shlex.split(line.partition(" | ")[0], comments=True))
        for line in lines
        if line.strip()
    ]


def train_arguments(words: list[str]) -> list[str] | None:
    """Arguments of a training run, whoever starts its ranks; None for another command."""
    text = shlex.join(words)
    if words[:2] == ["make", "train"]:
        return [part for word in words[2:] for part in shlex.split(word.removeprefix("ARGS="))]
    found = re.match(
        r"((srun )?python|torchrun( \S+)*?) train\.py( |$)|lightning-3d train( |$)", text
    )
    return shlex.split(text[found.end() :]) if found else None


def without_options(arguments: list[str]) -> list[str]:
    """Overrides among the arguments of Hydra: no `--help`, `--cfg job`, `-m`. A folder of
    configurations becomes a search path."""
    rest, kept = list(arguments), []
    while rest:
        word = rest.pop(0)
        if word == "--config-dir":
            kept.append(f"hydra.searchpath=[file://{rest.pop(0)}]")
        elif word in ("--cfg", "-c"):
            rest.pop(0)
        elif not word.startswith("-"):
            kept.append(word)
    return kept


def single_runs(arguments: list[str]) -> Iterator[list[str]]:
    """The overrides of each job of a sweep, or those of the run."""
    overrides = without_options(arguments)
    if "-m" not in arguments:
        yield overrides
        return
    choices = []
    for override in overrides:
        key, _, value = override.partition("=")
        parts = (
            value.split(",")
            if not re.search(r"[(\[{]", value)
            else [re.sub(r".*\((\S+?),.*", r"\1", value)]
        )
        choices.append([f"{key}={part}" for part in parts])
    yield from (list(job) for job in product(*choices))


def sandbox(folder: Path) -> Path:
    """Files of the documentation, a token file, conversations, and folders of small pretrained
    models under `models`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=8)).save_pretrained(
        folder / "models" / "Llama-3.1-8B"
    )
    shutil.copytree(folder / "models" / "Llama-3.1-8B", folder / "models" / "Mistral-7B-v0.1")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "data").mkdir()
    for corpus in (folder / "corpus.bin", folder / "data" / "corpus.bin"):
        corpus.write_bytes(
            bytes(value for index in range(60_000) for value in (index * 7 % 251, 0))
        )
        about = {"dtype": "uint16", "tokens": 60_000, "vocab_size": 257, "document_separator": 256}
        corpus.with_suffix(".json").write_text(json.dumps(about))
    return folder


def here(words: list[str], folder: Path) -> list[str]:
    """Arguments with the folders of the documentation (/models, /data, /mnt) inside a folder of
    ours."""
    return [re.sub(r"(^|=)/(models|data)/", rf"\g<1>{folder}/\2/", word) for word in words]
