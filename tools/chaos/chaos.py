"""Trains while ranks are killed, stopped and slowed, bits flip and losses become NaN, and shows
that nothing is lost.

    python tools/chaos/chaos.py [--seed N] [--minutes N | --steps N --faults N] [--layout NAME] [--two-nodes] [--elastic] [--csv FILE]

A run and the same run with faults, which is started again whenever it ends early, must have the
same loss in every step and the same final weights, to the last bit. With --elastic the layout
shrinks after a node is lost, and losses must be the same to rounding. Each fault must be named by a
message, and no message may name another one. Nothing may be left: processes, ports, sockets, shared
memory, temporary files, mounts, network namespaces. The exit code is 1 if anything is wrong.

A table shows for each fault: how it was injected, after how many seconds it was found, the message,
and the seconds that were lost. The share of time that went into lasting progress is the time of the
steps in the result, without saves and without what faults added to them, divided by the whole time
from the first start to the end. The aim is 90 % with one fault a minute.

The network is cut between two network namespaces, on which torchrun starts the ranks. With
--two-nodes, torchrun starts them there for all faults. Namespaces and a full disk need root.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "support"), str(ROOT)]

from chaos_attempts import (  # noqa: E402
    Output,
    Watch,
    fork_command,
    start_command,
    train_here,
    train_on,
)
from chaos_left import MARK, Traces  # noqa: E402
from chaos_plan import ABSENT_STEPS, KINDS, Fault, choose, false_alarms, write_plan  # noqa: E402
from chaos_result import SAVE_EVERY, Steps, differences, litter, load, show, write_csv  # noqa: E402
from starts import small_disk  # noqa: E402
from two_nodes import TwoNodes, available, two_nodes  # noqa: E402

AIM = 0.9
_DISK, _SHARED = 256 * 2**20, 2 * 2**30
_CALM_SHARE = 0.42
"""Share of --minutes for the run without faults; that with faults takes longer."""

_NEVER_ENDS = 1_000_000
_MOST_STARTS_PER_FAULT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos_")))
        traces = Traces(folder)
        kinds = set(KINDS)
        try:
            stack.enter_context(small_disk(folder / "chaos_disk", _DISK))
            stack.enter_context(small_disk(Path("/dev/shm"), _SHARED))
        except PermissionError as error:
            print(f"no fault fills the disk: {error}")
            (folder / "chaos_disk").mkdir(exist_ok=True)
            kinds.remove("full disk")
        kinds = {kind for kind in kinds if KINDS[kind].nodes is not False or not options.two_nodes}
        options.kinds = options.kinds or sorted(kinds)
        nodes = None
        if options.two_nodes or "cut" in options.kinds:
            if available():
                nodes = stack.enter_context(two_nodes(folder))
            else:
                print("no network is cut: this machine lets nobody make network namespaces")
                options.kinds.remove("cut")
        problems = Chaos(options, folder, nodes, traces).run()
    problems += [f"left behind: {thing}" for thing in traces.left_on_machine()]
    how = "to rounding" if options.elastic else "to the last bit"
    print(
        "\n".join(problems)
        if problems
        else f"same losses and weights as without faults, {how}; nothing is left behind"
    )
    return 1 if problems else 0


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=30, help="time for both runs, with one fault a minute"
    )
    parser.add_argument("--steps", type=int, help="steps of each run, instead of --minutes")
    parser.add_argument("--faults", type=int, default=6, help="number of faults in --steps")
    parser.add_argument("--layout", default="tp2_pp2_dp2")
    parser.add_argument(
        "--kinds",
        nargs="*",
        choices=sorted(KINDS),
        help="kinds of faults; all that are possible by default",
    )
    parser.add_argument(
        "--two-nodes", action="store_true", help="torchrun starts the ranks on two nodes"
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help=f"after a cut, {ABSENT_STEPS} steps run on one node, in a smaller layout",
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="fork commands from this process instead of starting them anew",
    )
    parser.add_argument("--csv", type=Path, help="file for the table")
    return parser.parse_args(arguments)


class Chaos:
    """A run without faults and one with faults.

    Args:
        options: the command line.
        folder: folder for both runs.
        nodes: nodes for cut networks; None where there are none.
        traces: what was on this machine before.
    """

    def __init__(
        self, options: argparse.Namespace, folder: Path, nodes: TwoNodes | None, traces: Traces
    ) -> None:
        self.options, self.folder, self.nodes, self.traces = options, folder, nodes, traces
        self.ranks = _ranks_of(options.layout)
        # the second on a disk that can be filled
        self.runs = {"calm": folder / "calm", "chaos": folder / "chaos_disk" / "chaos"}
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.steps, self.count = options.steps, options.faults
        self.faults: list[Fault] = []
        self.output = Output()
        self.cut: list[Fault] = []
        self.ended: list[float] = []

    def run(self) -> list[str]:
        """Train twice, print the table and return the problems."""
        if self.steps is not None:
            self._choose()
        calm = self._train_calmly()
        self._choose()
        write_plan(self.faults, self.folder / "plan.json")
        began, starts, code = time.time(), 0, 1
        while code and starts <= 1 + _MOST_STARTS_PER_FAULT * len(self.faults):
            starts += 1
            code = self._attempt()
        wall = time.time() - began
        for fault in self.faults:
            fault.happened(self._note_of(fault))
            fault.hear(self.output.lines)
        problems = self._problems(code)
        self._show(wall, calm, starts)
        return problems

    def _choose(self) -> None:
        self.faults = choose(
            self.options.seed, self.count, self.steps, self.ranks, self.options.kinds
        )

    def _train_calmly(self) -> float:
        """Train without faults, for as long as --minutes says or --steps long. Returns the
        seconds."""
        began = time.time()
        end = None if self.steps else began + self.options.minutes * 60 * _CALM_SHARE
        command = self._command("calm", self.steps or _NEVER_ENDS)
        output = Output()
        code = self._train_here(
            command, output, lambda: "terminate" if end and time.time() > end else None
        )
        if code not in (0, 143):
            raise SystemExit(f"The run without faults ended with exit code {code}:\n{output.end()}")
        seconds = time.time() - began
        if self.steps is None:
            self.steps = len((self.runs["calm"] / "metrics.csv").read_text().splitlines()) - 1
            self.count = max(1, round(seconds / 60 / AIM))
            again = f"--steps {self.steps} --faults {self.count}"
            print(
                f"without faults: {self.steps} steps in {seconds:.0f} s; repeat with {again}",
                flush=True,
            )
        return seconds

    def _attempt(self) -> int:
        """Start the run with faults once: on two nodes if the next fault needs them. Returns the
        exit code."""
        spoil = [f"+callbacks.faults.{key}={value}" for key, value in self._callback().items()]
        command, nodes = self._command("chaos", self.steps) + spoil, 0
        if self.options.two_nodes or self._next_is_cut():
            nodes = 2
        if self.options.elastic and self.cut and self._away():
            nodes = 1
        if nodes == 0:
            return self._train_here(command, self.output, self._watch_here)
        assert self.nodes is not None
        # a lost node is found within 20 s
        more = ["trainer.hang_timeout=60", f"parallelism.elastic={str(nodes == 1).lower()}"]
        command = [word for word in command if not word.startswith("trainer.hang_timeout=")] + more
        watch = self._watch_nodes if nodes == 2 else self._watch_rest
        return train_on(
            self.nodes, nodes, self.ranks // 2, command, self._environment(), self.output, watch
        )

    def _train_here(self, command: Sequence[str], output: Output, watch: Watch) -> int:
        start = fork_command if self.options.warm else start_command
        return train_here(start(command, self.folder, self._environment()), output, watch)

    def _callback(self) -> dict[str, object]:
        return {
            "_target_": "chaos_faults.Faults",
            "plan": self.folder / "plan.json",
            "notes": self.notes,
        }

    def _watch_here(self) -> str | None:
        """End an attempt on this machine when the earlier faults are over and the next one needs
        two nodes."""
        if not self._next_is_cut():
            return None
        following = self._next()
        assert following is not None
        before = self.faults.index(following) - 1
        if before >= 0 and Steps.read(self.notes / "steps").last <= self.faults[before].over:
            return None
        following.begin = following.begin or time.time()
        return "terminate"

    def _watch_nodes(self) -> str | None:
        """Cut the network when a rank has noted that it is time."""
        for fault in self.faults:
            if (
                fault.kind == "cut"
                and fault not in self.cut
                and fault.happened(self._note_of(fault))
            ):
                self.cut.append(fault)
                return "cut"
        return None

    def _watch_rest(self) -> str | None:
        """End the attempt on one node when the other one may come back."""
        if self._away():
            return None
        if len(self.ended) < len(self.cut):
            self.ended.append(time.time())
        return "terminate"

    def _away(self) -> bool:
        """Whether the node that was cut off last stays away."""
        return Steps.read(self.notes / "steps").last < self.cut[-1].step + ABSENT_STEPS

    def _next(self) -> Fault | None:
        return next(
            (fault for fault in self.faults if not fault.happened(self._note_of(fault))), None
        )

    def _next_is_cut(self) -> bool:
        following = self._next()
        return following is not None and following.kind == "cut"

    def _note_of(self, fault: Fault) -> Path:
        return self.notes / str(self.faults.index(fault))

    def _command(self, run: str, steps: int) -> list[str]:
        """Return the overrides of a run."""
        return [
            *(
                f"parallelism={self.options.layout}",
                "parallelism.zero_stage=0",
                "model=llama_tiny",
                "precision=fp32",
                "cluster=local_cpu",
            ),
            *(
                f"trainer.max_steps={steps}",
                f"trainer.val_check_interval={steps}",
                "trainer.limit_val_batches=1",
            ),
            *(
                f"trainer.checkpoint_every_n_steps={SAVE_EVERY}",
                f"trainer.check_replicas_every_n_steps={SAVE_EVERY}",
            ),
            *("trainer.slow_rank_steps=10", "trainer.slow_rank_factor=3", "trainer.hang_timeout=5"),
            *(
                "trainer.auto_resume=true",
                f"trainer.restarts={2 * self.count}",
                "trainer.restarts_without_progress=null",
            ),
            *(
                "optimizer.scheduler.name=constant",
                "model.config.hidden_size=64",
                "model.config.intermediate_size=96",
            ),
            *(
                "model.config.num_hidden_layers=2",
                "model.config.head_dim=8",
                "data.sequence_length=32",
                "data.val_sequences=4",
            ),
            *(
                "data.global_batch_size=8",
                "parallelism.micro_batch_size=2",
                f"hydra.run.dir={self.runs[run]}",
            ),
        ]

    def _environment(self) -> dict[str, str]:
        paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        more = {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            MARK: str(self.folder),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        return {**os.environ, **more}

    def _problems(self, code: int) -> list[str]:
        calm, chaos = self.runs["calm"], self.runs["chaos"]
        problems = [f"the run ended with exit code {code}:\n{self.output.end()}"] if code else []
        problems += differences(calm, chaos, same_layout=not (self.options.elastic and self.cut))
        problems += [
            f"not named: {one.kind} at step {one.step} on rank {one.rank}"
            for one in self.faults
            if not one.words
        ]
        problems += [
            f"named wrongly {alarm}"
            for alarm in false_alarms(self.faults, self.output.lines, self.ended)
        ]
        problems += [f"left behind in the run folder: {name}" for name in litter(calm, chaos)]
        return problems + [f"left behind: {thing}" for thing in self.traces.left()]

    def _show(self, wall: float, calm: float, starts: int) -> None:
        steps = Steps.read(self.notes / "steps")
        for fault in self.faults:
            fault.lost = steps.lost_to(fault)
        show(self.faults)
        if self.options.csv is not None:
            write_csv(self.faults, self.options.csv)
        share = steps.lasting(self.faults) / wall
        lost = sum(fault.lost or 0 for fault in self.faults)
        saves = steps.save_seconds() * len(
            [step for _, step in steps.ends if step % SAVE_EVERY == 0]
        )
        count = len(self.faults)
        print(
            f"{count} faults in {wall:.0f} s, one in {wall / count:.0f} s; without faults"
            f" {calm:.0f} s; {load()}"
        )
        print(
            f"{self.steps} steps, usually {steps.usual:.3f} s; {starts} commands, and restarts by"
            " them"
        )
        print(
            f"lost: {lost:.0f} s to faults, {saves:.0f} s to saves, the rest to the first start and"
            " the end"
        )
        print(
            f"lasting progress: {share:.1%} of the time; the aim with one fault a minute is"
            f" {AIM:.0%}"
        )


def _ranks_of(layout: str) -> int:
    ranks = 1
    for degree in re.findall(r"(?:tp|pp|dp|cp)(\d+)", layout):
        ranks *= int(degree)
    return ranks


if __name__ == "__main__":
    # an interrupted run leaves nothing either
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
