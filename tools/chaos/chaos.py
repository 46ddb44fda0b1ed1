"""Trains while ranks are killed, stopped and slowed, bits flip and losses become NaN, and shows that nothing is lost.

    python tools/chaos/chaos.py [--seed N] [--steps N] [--faults N] [--layout NAME] [--two-nodes]

A run and the same run with faults, which is started again whenever it ends early, must have the same loss in every step and the same
final weights, to the last bit. Each fault must be named by the run's messages. Prints a table: the fault, what was said, and after how many
seconds; and the share of time that went into steps that were kept. The exit code is 1 if anything is missing or left behind.

With --two-nodes, torchrun starts the ranks on two network namespaces, and the network between them can be cut. That needs root, and so does
the fault "full disk".
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from starts import small_disk  # noqa: E402
from two_nodes import ADDRESSES, TwoNodes, two_nodes  # noqa: E402

_DISK = 256 * 2**20
MOST_STARTS_PER_FAULT = 2
FIRST, APART = 8, 11
"""The first step with a fault, and the least distance: a fault that the next one hides cannot be named."""

NAMED = {
    "kill": r"rank {rank} of \d+ failed:\nit was killed by SIGKILL",
    "stop": r"rank {rank} does not answer: process \d+ on \S+ is stopped",
    "hang": r"rank \d+ has waited for rank {rank} .* in on_train_batch_start",
    "raise": r"rank {rank} of \d+ failed:\n(.*\n)*ArithmeticError: a fault of the chaos run",
    "terminate": r"the run was stopped by SIGTERM",
    "kill supervisor": None,
    "nan": r"the loss is nan .*Computed again from the same numbers, the step is finite",
    "flip": r"rank {rank} \(\S+, cpu\).*(holds other|hold different) weights",
    "slow": r"Slow: rank {rank} \(",
    "kill in a save": r"rank {rank} of \d+ failed:\nit was killed by SIGKILL",
    "full disk": r"Checkpoint \S+ could not be written; training continues without it: .*No space left on device",
    "cut": r"The node node1 with \d+ ranks? \(\S+\) is lost",
}
"""What a run must say of each fault. A process that is killed from outside says nothing."""

ON_TWO_NODES = ("cut", "raise", "nan", "flip", "slow")


@dataclass
class Said:
    """What became of a fault."""

    kind: str
    step: int
    rank: int
    words: str = ""
    seconds: float | None = None
    output: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--faults", type=int, default=6)
    parser.add_argument("--layout", default="tp2_dp2")
    parser.add_argument("--kinds", nargs="*", choices=sorted(NAMED))
    parser.add_argument("--two-nodes", action="store_true")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos_")))
        try:
            stack.enter_context(small_disk(folder / "chaos_disk", _DISK))
        except PermissionError as error:
            print(f"no fault fills the disk: {error}")
            (folder / "chaos_disk").mkdir(exist_ok=True)
            possible = [kind for kind in NAMED if kind != "full disk"]
        else:
            possible = list(NAMED)
        nodes = stack.enter_context(two_nodes(folder)) if options.two_nodes else None
        options.kinds = options.kinds or sorted(ON_TWO_NODES if nodes is not None else set(possible) - {"cut"})
        return run(options, folder, nodes)


def run(options: argparse.Namespace, folder: Path, nodes: TwoNodes | None) -> int:
    """Train twice and compare. Returns the exit code."""
    ranks = _ranks_of(options.layout)
    faults = choose(options.seed, options.faults, options.steps, ranks, options.kinds)
    (folder / "plan.json").write_text(json.dumps([{"kind": one.kind, "step": one.step, "rank": one.rank} for one in faults]))
    (folder / "done").mkdir()
    began = time.monotonic()
    start(folder, command_of(options, place(folder, "calm")))
    calm = time.monotonic() - began
    began, starts = time.monotonic(), 0
    given = {"_target_": "chaos_faults.Faults", "plan": folder / "plan.json", "done": folder / "done"}
    spoil = [f"+callbacks.faults.{key}={value}" for key, value in given.items()]
    command = command_of(options, place(folder, "chaos"), spoil)
    while True:
        starts += 1
        code, output = start(folder, command) if nodes is None else start_on(nodes, ranks // 2, folder, command, faults)
        _hear(faults, folder, output)
        if code == 0 or starts > 1 + MOST_STARTS_PER_FAULT * len(faults):
            break
    wall = time.monotonic() - began
    unnamed = [one for one in faults if NAMED[one.kind] and not one.words]
    problems = _compare(folder) + [f"not named: {one.kind} at step {one.step}:\n{one.output[-3000:]}" for one in unnamed]
    problems += [f"left behind: {line}" for line in _left(folder)]
    problems += [f"the run ended with exit code {code}: {output[-2000:]}"] if code else []
    _show(faults, folder, starts, wall, calm)
    print("\n".join(problems) if problems else "same losses and weights as without faults, to the last bit; nothing is left behind")
    return 1 if problems else 0


def choose(seed: int, count: int, steps: int, ranks: int, kinds: Sequence[str]) -> list[Said]:
    """Choose faults at different steps, in order; each kind once before one comes again. Not in the first steps, nor in the last.

    Raises:
        SystemExit: there are too few steps.
    """
    numbers = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += numbers.sample(list(kinds), len(kinds))
    room = (steps - FIRST - APART) // count
    if room < APART:
        raise SystemExit(f"{count} faults need at least {FIRST + APART + count * APART} steps; got --steps {steps}.")
    places = [FIRST + place * room + numbers.randrange(room - APART + 1) for place in range(count)]
    return [Said(kind, place, numbers.randrange(1, ranks)) for kind, place in zip(order[:count], places, strict=True)]


def place(folder: Path, name: str) -> Path:
    """Return the run folder of a run; that of the one with faults is on a disk of its own."""
    return folder / "chaos_disk" / name if name == "chaos" else folder / name


def command_of(options: argparse.Namespace, run: Path, more: Sequence[str] = ()) -> list[str]:
    """Return the overrides of a run."""
    return [
        *(f"parallelism={options.layout}", "parallelism.zero_stage=0", "model=llama_tiny", "precision=fp32", "cluster=local_cpu"),
        *(f"trainer.max_steps={options.steps}", f"trainer.val_check_interval={options.steps}", "trainer.limit_val_batches=1"),
        *("trainer.checkpoint_every_n_steps=5", "trainer.check_replicas_every_n_steps=5", "trainer.slow_rank_steps=10"),
        *(f"trainer.hang_timeout={60 if options.two_nodes else 3}", "trainer.auto_resume=true", "trainer.restarts_without_progress=null"),
        *("model.config.hidden_size=64", "model.config.intermediate_size=96", "model.config.num_hidden_layers=2"),
        "model.config.head_dim=8",
        *("data.sequence_length=32", "data.val_sequences=4", "data.global_batch_size=8", "parallelism.micro_batch_size=2"),
        f"hydra.run.dir={run}",
        *more,
    ]


def start(folder: Path, overrides: Sequence[str]) -> tuple[int, str]:
    """Train until the run ends. Returns its exit code and what it printed."""
    command = [sys.executable, "-m", "lightning_3d", "train", *overrides]
    log = folder / "output"
    with log.open("w") as output:
        code = subprocess.run(command, cwd=folder, env=_environment(), stdout=output, stderr=output, check=False, timeout=3600).returncode
    return code, log.read_text()


def start_on(nodes: TwoNodes, ranks: int, folder: Path, overrides: Sequence[str], faults: Sequence[Said]) -> tuple[int, str]:
    """Train with torchrun on two nodes until the ranks of the first have ended, and cut the network when a fault asks for it."""
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", "chaos", "--max-restarts", "0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks), *meet]
    command = [*torchrun, str(ROOT / "train.py"), *overrides]
    logs = [folder / f"node{node}.log" for node in (0, 1)]
    for log in logs:
        log.write_text("")
    notes = [folder / "done" / f"{number}.json" for number, one in enumerate(faults) if one.kind == "cut"]
    seen = {note for note in notes if note.exists()}
    first, second = (nodes.start(node, command, folder, _environment(), logs[node]) for node in (0, 1))
    while first.poll() is None:
        if fresh := {note for note in notes if note.exists()} - seen:
            nodes.cut()
            seen |= fresh
        time.sleep(0.2)
    if first.returncode == 0:
        second.wait(60)
    else:  # cut off, torchrun itself would wait for minutes
        subprocess.run(["pkill", "-KILL", "-f", f"hydra.run.dir={place(folder, 'chaos')}"], check=False)
        second.wait(60)
    nodes.mend()
    return first.returncode, "".join(log.read_text() for log in logs)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])}


def _ranks_of(layout: str) -> int:
    ranks = 1
    for degree in re.findall(r"(?:tp|pp|dp|cp)(\d+)", layout):
        ranks *= int(degree)
    return ranks


def _hear(faults: list[Said], folder: Path, output: str) -> None:
    """Note which faults the output names, and how long after they happened it ended."""
    for number, one in enumerate(faults):
        note, pattern = folder / "done" / f"{number}.json", NAMED[one.kind]
        if not note.exists() or one.seconds is not None:
            continue
        one.seconds = time.time() - json.loads(note.read_text())["time"]
        one.output = output
        found = re.search(pattern.format(rank=one.rank), output) if pattern is not None else None
        one.words = next(line for line in found[0].splitlines()[::-1] if line.strip())[:110] if found else ""


def _compare(folder: Path) -> list[str]:
    """Say what differs between the two runs."""
    columns = []
    for name in ("calm", "chaos"):
        with (place(folder, name) / "metrics.csv").open() as file:
            columns.append([(row["step"], row["loss"], row["grad_norm"]) for row in csv.DictReader(file)])
    problems = [] if columns[0] == columns[1] else ["the losses differ"]
    hashes = [_hashes(place(folder, name)) for name in ("calm", "chaos")]
    return problems + ([] if hashes[0] == hashes[1] and hashes[0] else ["the final weights differ"])


def _hashes(run: Path) -> dict[str, str]:
    """Hashes of the tensors in the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step_*.ckpt"), key=lambda path: int(re.findall(r"\d+", path.name)[-1]))
    manifest = json.loads((newest / "manifest.json").read_text())
    return {name: json.dumps(entry) for name, entry in manifest["files"].items() if name.endswith((".safetensors", ".distcp"))}


def _left(folder: Path) -> list[str]:
    """Processes of the runs that still exist."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in listed if str(folder) in line and "chaos.py" not in line]


def _show(faults: list[Said], folder: Path, starts: int, wall: float, calm: float) -> None:
    print(f"{'fault':<16} {'step':>4} {'rank':>4} {'seconds':>8}  said")
    for one in faults:
        seconds = "" if one.seconds is None else f"{one.seconds:.1f}"
        print(f"{one.kind:<16} {one.step:>4} {one.rank:>4} {seconds:>8}  {one.words}")
    with (place(folder, "chaos") / "metrics.csv").open() as file:
        times = [float(row["step_seconds"]) for row in csv.DictReader(file)]
    kept = median(times) * len(times)
    print(f"{starts} starts in {wall:.0f} s; without faults one, in {calm:.0f} s")
    print(f"steps that were kept took {kept:.0f} s, {kept / wall:.0%} of the time")


if __name__ == "__main__":
    sys.exit(main())
