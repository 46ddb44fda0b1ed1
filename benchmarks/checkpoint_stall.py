"""What checkpoints cost: the step after a save, the bytes on the disk, and the rate of saving and
loading against `dd`.

    python benchmarks/checkpoint_stall.py                      one rank of one thread: a core is left for the writing
    python benchmarks/checkpoint_stall.py --ranks 2            as many ranks as cores: training and writing share them

A real fit of a Llama in float32 with AdamW saves every few steps. The step after a save is timed
from the end of the step before, so that it includes the call that saves. Where other programs use
the same cores, steps are compared without the time in which the thread that trains was ready and no
core was free, which the kernel counts; with one rank that is what a machine with a core to spare
would show. Files are put out of the page cache before they are loaded.
"""  # noqa: E501

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from measure import environments, machine

DD_BLOCK = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="data-parallel, with ZeRO-1 if there are several"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--between", type=int, default=5, help="steps from one save to the next")
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank in a step")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--folder", help="on the disk that is measured; default: the one for temporary files"
    )
    options = parser.parse_args()
    print(json.dumps(machine(), indent=2))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for synchronous in (False, True):
            found = run(options, Path(folder), synchronous)
            print(
                "\n".join(stall(found, "synchronous" if synchronous else "asynchronous")),
                flush=True,
            )
        print("\n".join(throughput(found, Path(folder))))


def run(options: argparse.Namespace, folder: Path, synchronous: bool) -> list[dict[str, Any]]:
    """What each rank of a fit measured."""
    given = [
        f"--{name}={getattr(options, name)}"
        for name in ("ranks", "threads", "saves", "between", "tokens", "hidden", "layers")
    ]
    worker = str(Path(__file__).with_name("checkpoint_stall_worker.py"))
    command = [
        sys.executable,
        worker,
        *given,
        f"--folder={folder}",
        *(["--synchronous"] if synchronous else []),
    ]
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    ranks = []
    for rank, environment in enumerate(environments(options.ranks, options.threads)):
        ranks.append(
            subprocess.Popen([*command, f"--result={folder / f'{rank}.json'}"], env=environment)
        )
    try:
        for process in ranks:
            if process.wait() != 0:
                raise RuntimeError("A rank failed, see above.")
    finally:
        for process in ranks:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(options.ranks)]


def stall(found: list[dict[str, Any]], kind: str) -> list[str]:
    """Lines about the steps after saves, of the rank that waits longest."""
    steps = found[0]["steps"]
    quiet = median(step["seconds"] for step in steps if step["quiet"])
    after = [
        max(rank["steps"][index]["seconds"] for rank in found)
        for index, step in enumerate(steps)
        if step["saved"]
    ]
    calm = [step["seconds"] - step["no_core"] for step in steps if step["quiet"]]
    calm_after = [step["seconds"] - step["no_core"] for step in steps if step["saved"]]
    calls = [
        max(rank["steps"][index]["save_call"] for rank in found)
        for index, step in enumerate(steps)
        if step["saved"]
    ]
    ratios = sorted(seconds / quiet for seconds in after)
    noise = sorted(step["seconds"] / quiet for step in steps if step["quiet"])
    busy = [step for step in steps if not step["quiet"]]
    extra = (sum(step["seconds"] for step in busy) - len(busy) * quiet) / len(after)
    return [
        f"{kind}: median step {quiet:.3f} s (others: {noise[0]:.3f} to {noise[-1]:.3f} of it)",
        (
            f"{kind}: step after a save / median step: {median(ratios):.3f} (of {len(ratios)}"
            f" saves: {ratios[0]:.3f} to {ratios[-1]:.3f}); of it the call that saves:"
            f" {median(calls) / quiet:.3f} ({median(calls) * 1e3:.0f} ms)"
        ),
        (
            f"{kind}: the same without waiting for a core: {median(calm_after) / median(calm):.3f}"
            f" (others: {min(calm) / median(calm):.3f} to {max(calm) / median(calm):.3f} of"
            f" {median(calm):.3f} s)"
        ),
        f"{kind}: a save costs {extra:.3f} s of training in all, {extra / quiet:.3f} steps",
    ]


def throughput(found: list[dict[str, Any]], folder: Path) -> list[str]:
    """Lines about bytes and rates: medians of saves that were waited for, and one load."""
    path = max((folder / "checkpoints").glob("[!.]*"), key=lambda path: path.stat().st_mtime)
    files = [file for file in path.iterdir() if file.is_file()]
    written, unique = sum(file.stat().st_size for file in files), found[0]["state_bytes"]
    save = median(
        max(rank["steps"][index]["save_call"] for rank in found)
        for index, step in enumerate(found[0]["steps"])
        if step["saved"]
    )
    loads = {part: max(rank["load"][part] for rank in found) for part in found[0]["load"]}
    write, read = written / dd_write(folder, written), written / dd_read(files)
    digest = written / hashing(files)
    loaded = loads["verify"] + loads["read"]
    return [
        (
            f"bytes on the disk / bytes of weights and optimizer state: {written} / {unique} ="
            f" {written / unique:.4f}"
        ),
        (
            f"dd: writes {write / 1e6:.0f} MB/s (conv=fsync), reads {read / 1e6:.0f} MB/s"
            f" (iflag=direct); SHA-256 of one thread {digest / 1e6:.0f} MB/s"
        ),
        (
            f"save: {written / save / 1e6:.0f} MB/s, {written / save / write:.2f} of dd; hashing by"
            f" one rank takes {written / digest / save:.2f} of its time"
        ),
        (
            f"load: {written / loaded / 1e6:.0f} MB/s, {written / loaded / read:.2f} of dd; of its"
            f" {loaded:.2f} s comparing hashes takes {loads['verify'] / loaded:.2f} (and reads what"
            " is then in the page cache)"
        ),
        (
            f"load without comparing hashes: {written / loads['read_unverified'] / 1e6:.0f} MB/s,"
            f" {written / loads['read_unverified'] / read:.2f} of dd"
        ),
    ]


def dd_write(folder: Path, nbytes: int) -> float:
    """Seconds."""
    target = folder / "dd"
    command = [
        "dd",
        "if=/dev/zero",
        f"of={target}",
        f"bs={DD_BLOCK}",
        f"count={nbytes // DD_BLOCK}",
        "conv=fsync",
        "status=none",
    ]
    seconds = median(_timed(command) for _ in range(3))
    target.unlink()
    return seconds


def dd_read(files: list[Path]) -> float:
    """Seconds for all of them."""
    return sum(
        _timed(
            ["dd", f"if={file}", "of=/dev/null", f"bs={DD_BLOCK}", "iflag=direct", "status=none"]
        )
        for file in files
    )


def _timed(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - started


def hashing(files: list[Path]) -> float:
    """Seconds for the contents of all of them, in memory."""
    seconds = 0.0
    for file in files:
        contents = file.read_bytes()
        started = time.perf_counter()
        hashlib.sha256(contents)
        seconds += time.perf_counter() - started
    return seconds


if __name__ == "__main__":
    main()
