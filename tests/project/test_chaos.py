"""The chaos run: what it chooses, what it finds, and that it ends as it should."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starts import in_fresh_process

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "chaos"
SAME = "same losses and weights as without faults, to the last bit; nothing is left behind"


@pytest.fixture(autouse=True)
def tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_apart_and_the_same_for_a_seed(seed: int) -> None:
    from chaos_plan import APART, FIRST, KINDS, choose

    kinds, steps = sorted(KINDS), 220
    faults = choose(seed, len(kinds), steps, 4, kinds)
    assert sorted(one.kind for one in faults) == kinds
    assert all(
        later.step - earlier.over >= APART
        for earlier, later in zip(faults, faults[1:], strict=False)
    )
    assert (
        faults[0].step >= FIRST
        and faults[-1].over <= steps - APART
        and all(1 <= one.rank < 4 for one in faults)
    )
    assert choose(seed, len(kinds), steps, 4, kinds) == faults


def test_too_few_steps_are_refused() -> None:
    from chaos_plan import choose

    with pytest.raises(SystemExit, match="These 3 faults need at least 52 steps; got --steps 51"):
        choose(0, 3, 51, 4, ["kill", "nan", "flip"])


def test_a_message_counts_for_the_fault_and_the_rank_that_it_names() -> None:
    from chaos_plan import Fault, false_alarms

    def killed(rank: int, when: float) -> list[tuple[float, str]]:
        return [
            (when, f"lightning_3d: rank {rank} of 4 failed:"),
            (when, "it was killed by SIGKILL and reported no error."),
        ]

    def faults() -> list[Fault]:
        return [
            Fault("kill", 10, 2, begin=100.0, time=100.0),
            Fault("nan", 30, 1, begin=200.0, time=200.0),
        ]

    right, wrong, late = faults(), faults(), faults()
    for given, lines in (
        (right, killed(2, 101.5)),
        (wrong, killed(1, 101.5)),
        (late, killed(2, 201.5)),
    ):
        for fault in given:
            fault.hear(lines)
    assert (right[0].words, right[0].seconds, right[1].words) == (
        "it was killed by SIGKILL",
        1.5,
        "",
    )
    assert false_alarms(right, killed(2, 101.5)) == []
    assert not wrong[0].words
    assert "after kill on rank 2" in false_alarms(wrong, killed(1, 101.5))[0]
    assert "after nan on rank 1" in false_alarms(late, killed(2, 201.5))[0]


def test_an_elastic_run_that_is_told_to_end_so_that_it_can_grow_is_no_fault() -> None:
    from chaos_plan import Fault, false_alarms

    cut = [Fault("cut", 10, 2, begin=90.0, time=100.0)]
    stopped = "lightning_3d: the run was stopped by SIGTERM after step 18 of 50"
    assert false_alarms(cut, [(130.0, stopped)], [129.0]) == []
    for lines, ended in (
        ([(130.0, stopped)], []),
        ([(130.0, stopped)], [131.0]),
        ([(130.0, stopped), (140.0, stopped)], [129.0]),
    ):
        assert len(false_alarms(cut, lines, ended)) == 1


def test_time_lost_is_that_until_the_step_of_the_fault_is_done() -> None:
    from chaos_plan import Fault
    from chaos_result import Steps

    first = [(float(step), step) for step in range(1, 13)]
    # step 13 is killed at 12.5; the run resumes step 10 at about 30
    again = [(20.0 + step, step) for step in range(11, 31)]
    fault = Fault("kill", 13, 1, begin=12.5, time=12.5)
    steps = Steps([*first, *again])
    assert steps.usual == 1.0
    assert steps.lost_to(fault) == 33.0 - 12.5 - 1.0
    assert steps.lasting([fault]) == 30.0
    assert Steps(first).lost_to(fault) is None


def a_run(folder: Path, loss: float = 2.5, weights: str = "abc") -> Path:
    checkpoint = folder / "checkpoints" / "step_2.ckpt"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(
        json.dumps({"files": {"rank_0.safetensors": {"sha256": weights}, "state.json": {}}})
    )
    (folder / "metrics.csv").write_text(f"step,loss,grad_norm\n1,3.5,1.0\n2,{loss},1.0\n")
    (folder / ".lock").touch()
    return folder


def test_another_last_bit_is_a_difference_unless_the_layout_changed(tmp_path: Path) -> None:
    from chaos_result import differences, litter

    calm, same = a_run(tmp_path / "calm"), a_run(tmp_path / "same")
    assert differences(calm, same, same_layout=True) == [] and litter(calm, same) == []
    rounded = a_run(tmp_path / "rounded", 2.5000001, "abd")
    assert differences(calm, rounded, same_layout=True) == [
        "the losses differ from step 2",
        "the final weights differ",
    ]
    assert differences(calm, rounded, same_layout=False) == []
    assert differences(calm, a_run(tmp_path / "other", 2.6), same_layout=False) == [
        "the losses differ from step 2"
    ]
    flipped = a_run(tmp_path / "flipped", weights="abd")
    assert differences(calm, flipped, same_layout=True) == ["the final weights differ"]
    (same / "logs").mkdir()
    (same / "logs" / ".failures_x1").mkdir()
    assert litter(calm, same) == ["logs/.failures_xN"]


def test_any_problem_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import chaos

    found: list[str] = []
    left: list[str] = []
    monkeypatch.setattr(chaos, "small_disk", lambda where, size: contextlib.nullcontext())
    monkeypatch.setattr(chaos.Chaos, "run", lambda self: list(found))
    monkeypatch.setattr(chaos.Traces, "left_on_machine", lambda self: left)
    words = ["--layout", "dp2", "--steps", "45", "--faults", "1", "--kinds", "nan"]
    assert chaos.main(words) == 0
    found.append("not named: nan at step 9 on rank 1")
    assert chaos.main(words) == 1
    found.clear()
    left.append("network namespace l3d1a")
    assert chaos.main(words) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        SAME,
        "not named: nan at step 9 on rank 1",
        "left behind: network namespace l3d1a",
    ]


@pytest.fixture
def leftovers(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What two runs leave, by what: the environment of the second one's processes is marked."""
    with contextlib.ExitStack() as stack:
        from chaos_left import MARK, Traces

        traces = Traces(tmp_path)
        assert traces.left() == []
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        marked = {**os.environ, MARK: str(tmp_path)}
        command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
        kept = stack.enter_context(
            subprocess.Popen(
                command, env=marked, cwd="/", pass_fds=[listener.fileno()], stdout=subprocess.PIPE
            )
        )
        stack.callback(kept.kill)
        assert kept.stdout is not None and kept.stdout.readline()
        listener.close()
        shared = Path(f"/dev/shm/chaos_test_{os.getpid()}")
        shared.touch()
        stack.callback(shared.unlink)
        (tmp_path / "tmp" / "pymp-x").mkdir()
        (tmp_path / "tmp" / "torchinductor_root").mkdir()  # torch keeps it
        other = stack.enter_context(socket.socket())  # that of a process of somebody else
        other.bind(("127.0.0.1", 0))
        other.listen()
        found = "\n".join(traces.left())
        yield {
            "found": found,
            "port": str(port),
            "other": str(other.getsockname()[1]),
            "process": str(kept.pid),
            "shared": str(shared),
        }


def test_what_is_left_behind_is_found(leftovers: dict[str, str]) -> None:
    found = leftovers["found"]
    assert (
        f"process {leftovers['process']}" in found
        and f"listening port {leftovers['port']}" in found
    )
    assert f"file {leftovers['shared']}" in found and "/tmp/pymp-x" in found
    assert leftovers["other"] not in found and "torchinductor" not in found


def run_tool(words: list[str]) -> tuple[int, str]:
    """Run the tool in a process that has imported torch and its friends already."""
    sys.path.insert(0, str(FOLDER))
    from chaos import main

    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(words)
    return code, said.getvalue()


SHORT = ["--layout", "dp2", "--steps", "41", "--faults", "2", "--warm"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_faults_is_that_without() -> None:
    code, said = in_fresh_process(
        run_tool, [*SHORT, "--kinds", "kill in a save", "nan"], timeout=590
    )
    assert code == 0 and SAME in said and "lasting progress: " in said, said


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words",
    [
        "--layout dp2 --faults 5 --steps 110 --kinds kill nan flip stop full_disk",
        "--layout tp2_dp2 --faults 3 --steps 70 --kinds cut nan raise --two-nodes",
        "--layout tp2_dp2 --faults 2 --steps 70 --kinds cut --elastic",
    ],
)
def test_a_long_run_with_faults_is_that_without(words: str) -> None:
    given = [word.replace("_disk", " disk") for word in words.split()]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "chaos.py"), *given],
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    how = "to rounding" if "--elastic" in given else "to the last bit"
    assert (
        f"same losses and weights as without faults, {how}; nothing is left behind" in done.stdout
    )
