"""Throughput of `lightning-3d tokenize` and of others on the same text, tokenizer and cores:
`python benchmarks/tokenizing.py --rounds 3`.

The others are Megatron's `tools/preprocess_data.py` and datatrove's `MegatronDocumentTokenizer`.
All write Megatron's `.bin` and `.idx` with a token at the end of each document, and the tokens of
all of them must be the same, byte by byte. A time is that of a whole command with its start, into a
new folder. The contenders take turns; a ratio is our time over the peer's in the same round.

Each has the same number of processes that tokenize, with one thread each. Ours and Megatron's have
one more, which reads and writes; with `--processes 1`, ours does all in one. datatrove shares out
whole files, so it gets the corpus in one file for each process.

Megatron is fetched from its public repository at one commit, or taken from a checkout or Git
directory (`--megatron PATH`). datatrove is in the environment, or in a folder of `pip install
--target` (`--datatrove FOLDER`). `tokenizing_worker.py` says what of them is replaced or left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

from load import Load, LoadMeter
from measure import cores, machine
from peer_sources import MEGATRON, source_folder
from peers import verdict
from tokenizing_corpus import SEPARATOR, VOCABULARY, Corpus, train_tokenizer, write_corpus

from lightning_3d.ranks.process_ties import die_with

WORKER = Path(__file__).with_name("tokenizing_worker.py")
DATATROVE = "datatrove==0.10.1"
OURS = "lightning-3d tokenize"
NOT_SLOWER = 1.0


@dataclass(frozen=True)
class Tokenized:
    """What one command did.

    Attributes:
        seconds: from its start to its end.
        processor_seconds: of it and its processes.
        largest_mib: memory of the largest of its processes.
        tokens: in its files, with those that end documents.
        sha256: of all token ids in the order of the documents.
    """

    seconds: float
    processor_seconds: float
    largest_mib: float
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Contender:
    """A program. Its command writes `.bin` files into the folder that takes the place of
    `{out}`."""

    name: str
    command: tuple[str, ...]

    def run(self, scratch: Path) -> Tokenized:
        """Run the command into a new folder, and remove the folder.

        Raises:
            SystemExit: the command failed; with the end of its output.
        """
        out = scratch / "out"
        out.mkdir()
        command = [word.replace("{out}", str(out)) for word in self.command]
        with (scratch / "log.txt").open("wb") as log:
            started = time.perf_counter()
            process = subprocess.Popen(
                command,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(die_with, os.getpid()),
            )
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(
                f"{self.name} failed. It"
                f" said:\n{(scratch / 'log.txt').read_text(errors='replace')[-4000:]}"
            )
        tokens, sha256 = read_tokens(out)
        shutil.rmtree(out)
        return Tokenized(
            seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, tokens, sha256
        )


def environment() -> dict[str, str]:
    """One thread for each process, and this checkout."""
    threads = {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    repository = str(Path(__file__).parents[1])
    return (
        os.environ
        | threads
        | {"PYTHONPATH": os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH")]))}
    )


def read_tokens(folder: Path) -> tuple[int, str]:
    """Number and SHA-256 of the uint16 ids in all `.bin` files of a folder, in the order of their
    names."""
    hashed, size = hashlib.sha256(), 0
    for path in sorted(folder.glob("*.bin")):
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                hashed.update(piece)
                size += len(piece)
    return size // 2, hashed.hexdigest()


def contenders(
    corpus: Corpus, tokenizer: Path, processes: int, peers: dict[str, Path]
) -> list[Contender]:
    """Our command and those of the peers, from the folders that they are in."""
    ours = [
        sys.executable,
        "-m",
        "lightning_3d",
        "tokenize",
        str(corpus.file),
        "--tokenizer",
        str(tokenizer),
    ]
    found = [Contender(OURS, (*ours, "--processes", str(processes), "--out", "{out}"))]
    if "megatron" in peers:
        options = {
            "input": corpus.file,
            "output-prefix": "{out}/tokens",
            "tokenizer-type": "HuggingFaceTokenizer",
        }
        options |= {"tokenizer-model": tokenizer, "workers": processes}
        words = [f"--{name}={value}" for name, value in options.items()]
        found.append(
            Contender(
                "Megatron preprocess_data.py", (*_worker("megatron", peers), *words, "--append-eod")
            )
        )
    if "datatrove" in peers:
        words = [
            str(corpus.parts),
            str(tokenizer / "tokenizer.json"),
            SEPARATOR,
            "{out}",
            str(processes),
        ]
        found.append(Contender("datatrove", (*_worker("datatrove", peers), *words)))
    return found


def _worker(peer: str, peers: dict[str, Path]) -> tuple[str, ...]:
    return sys.executable, str(WORKER), peer, str(peers[peer])


def find_peers(options: argparse.Namespace, scratch: Path) -> dict[str, Path]:
    """Folders of the peers that can be imported. Says in a line what another one needs."""
    peers: dict[str, Path] = {}
    if "megatron" in options.peers:
        try:
            peers["megatron"] = source_folder(MEGATRON, options.megatron, scratch).resolve()
        except SystemExit as failure:
            print(
                f"megatron is left out: {failure}. Give --megatron PATH, a checkout or Git"
                f" directory of {MEGATRON.url}."
            )
    if "datatrove" in options.peers:
        peers["datatrove"] = (options.datatrove or scratch).resolve()
    needs = {
        "megatron": 'pip install "nltk" "transformers"',
        "datatrove": f'pip install "{DATATROVE}" orjson, or --datatrove FOLDER',
    }
    for peer in list(peers):
        tried = subprocess.run(
            _worker(peer, peers), env=environment(), capture_output=True, text=True, check=False
        )
        if tried.returncode:
            print(
                f"{peer} is left out: {tried.stderr.strip().splitlines()[-1]}. It needs:"
                f" {needs[peer]}"
            )
            del peers[peer]
    return peers


def race(
    found: list[Contender], rounds: int, scratch: Path
) -> tuple[dict[str, list[Tokenized]], Load]:
    """Let them take turns, backwards in every other round, and measure what other processes of the
    machine did."""
    done: dict[str, list[Tokenized]] = {contender.name: [] for contender in found}
    meter = LoadMeter(())
    for index in range(rounds):
        for contender in found if index % 2 == 0 else found[::-1]:
            done[contender.name].append(contender.run(scratch))
            meter.look()
        print(
            f"round {index + 1}: "
            + ", ".join(f"{name} {runs[-1].seconds:.1f} s" for name, runs in done.items()),
            flush=True,
        )
    return done, meter.read()


HEADER = (
    f"{'':28} {'s':>7} {'CPU s':>7} {'tokens':>12} {'tokens/s':>10} {'MB/s':>6} {'largest MiB':>11}"
    f"  {'ours/peer':>9} {'min':>6} {'max':>6}  not slower?"
)


def row(name: str, done: dict[str, list[Tokenized]], size: int, load: Load) -> str:
    """A line of the table: medians over the rounds, and the ratio of our time to this peer's.

    Args:
        size: bytes of the corpus.
    """
    runs = done[name]
    seconds = median(run.seconds for run in runs)
    line = (
        f"{name:28} {seconds:7.1f} {median(run.processor_seconds for run in runs):7.1f}"
        f" {runs[0].tokens:12d} {runs[0].tokens / seconds:10.0f} {size / 1e6 / seconds:6.2f}"
        f" {max(run.largest_mib for run in runs):11.0f}"
    )
    if name == OURS:
        return line
    found = sorted(ours.seconds / run.seconds for ours, run in zip(done[OURS], runs, strict=True))
    if {(run.tokens, run.sha256) for run in runs} != {
        (run.tokens, run.sha256) for run in done[OURS]
    }:
        judged = "cannot tell: other tokens than ours"
    else:
        judged = verdict(found, NOT_SLOWER, load)
    return f"{line}  {median(found):9.3f} {found[0]:6.3f} {found[-1]:6.3f}  {judged}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        default=200,
        help="size of the corpus, JSON lines of the standard library",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=cores(),
        help="that tokenize, of each contender; default: one for each core",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["megatron", "datatrove"],
        choices=["megatron", "datatrove"],
        help="only these peers",
    )
    parser.add_argument(
        "--megatron",
        type=Path,
        metavar="PATH",
        help="checkout or Git directory of Megatron-LM; by default it is fetched",
    )
    parser.add_argument(
        "--datatrove",
        type=Path,
        metavar="FOLDER",
        help="folder of pip install --target; by default the environment",
    )
    parser.add_argument("--output", type=Path, help="JSON file for all times")
    options = parser.parse_args()
    print(json.dumps(machine(), indent=2))
    with tempfile.TemporaryDirectory(prefix="lightning_3d_tokenizing_") as folder:
        scratch = Path(folder)
        peers = find_peers(options, scratch)
        corpus = write_corpus(scratch, int(options.megabytes * 1e6), options.processes)
        found = contenders(corpus, train_tokenizer(scratch / "tokenizer"), options.processes, peers)
        size = corpus.bytes
        print(
            f"{size / 1e6:.0f} MB, {corpus.documents} documents, a BPE of {VOCABULARY} entries,"
            f" {options.processes} processes"
        )
        done, load = race(found, options.rounds, scratch)
    if options.output:
        runs = {name: [asdict(run) for run in each] for name, each in done.items()}
        options.output.write_text(
            json.dumps(
                {"machine": machine(), "bytes": size, "load": asdict(load), "runs": runs}, indent=1
            )
        )
    print(f"load: {load}")
    print("\n".join([HEADER, *(row(name, done, size, load) for name in done)]))


if __name__ == "__main__":
    main()
