"""The self-test: what is exact passes, and planted faults, hangs and errors are found and named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import selftest_faults

from lightning_3d.app.cli import selftest as command
from lightning_3d.app.cli.main import main
from lightning_3d.app.verification import session, verdicts, workers
from lightning_3d.app.verification.cells import Cell, all_cells, chosen
from lightning_3d.app.verification.verdicts import (
    EXACT,
    FAILED,
    HANGS,
    NOT_REACHED,
    SKIPPED,
    WRONG,
    CellVerdict,
    judge,
)

DP = Cell("dp", "data parallel", "dp2")
TP = Cell("tp", "tensor parallel", "tp2")


@pytest.mark.slow
def test_a_wrong_collective_is_found_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [DP, replace(TP, layout="tp4")]
    finished = session.run(cells, 2, 0, 120.0, prepare=selftest_faults.enlarge_sums)
    assert [verdict.verdict for verdict in finished.verdicts] == [WRONG, SKIPPED]
    assert finished.verdicts[1].why == "needs 4 ranks"
    assert verdicts.is_wrong(finished)
    verdicts.write(finished, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (
        found["wrong"]
        and found["machine"]["accelerator"] == "cpu"
        and found["machine"]["libraries"]["torch"]
    )
    assert found["cells"][0]["verdict"] == WRONG and len(found["cells"][0]["losses"]) == 4
    assert max(map(len, verdicts.table(finished).splitlines())) <= verdicts.WIDTH


@pytest.mark.slow
def test_a_hang_and_an_error_are_named_and_the_next_cell_runs() -> None:
    finished = session.run(
        [replace(TP, seconds=4.0), DP], 2, 0, 120.0, prepare=selftest_faults.hang_in_tp
    )
    hang, exact = finished.verdicts
    assert (
        hang.verdict == HANGS
        and "no answer within 4 s" in hang.why
        and "selftest_faults.py" in hang.trace
    )
    assert exact.verdict == EXACT


@pytest.mark.full
def test_an_error_in_one_rank_is_named_with_its_traceback() -> None:
    failed, exact = session.run([TP, DP], 2, 0, 120.0, prepare=selftest_faults.fail_in_tp).verdicts
    assert failed.verdict == FAILED and "planted on purpose" in failed.trace
    assert exact.verdict == EXACT


@pytest.mark.full
def test_a_wrong_learning_rate_is_seen_in_the_weights() -> None:
    (verdict,) = session.run(
        [DP], 2, 0, 120.0, prepare=selftest_faults.raise_learning_rate
    ).verdicts
    assert verdict.verdict == WRONG


@pytest.mark.full
def test_all_cells_on_four_ranks(tmp_path: Path) -> None:
    output = tmp_path / "all.json"
    assert (
        main(
            [
                "selftest",
                "cluster=local_cpu",
                "--ranks",
                "4",
                "--minutes",
                "15",
                "--output",
                str(output),
            ]
        )
        == 0
    )
    verdicts = {cell["verdict"] for cell in json.loads(output.read_text())["cells"]}
    assert verdicts == {EXACT, SKIPPED}


def test_cells_that_time_does_not_reach_are_named() -> None:
    finished = session.run([DP], 1, 0, 0.0)
    assert finished.verdicts[0].verdict == SKIPPED
    assert session._verdict(DP, 2, finished.machine, None, None, 0.0, "cpu").verdict == NOT_REACHED  # type: ignore[arg-type]


def test_nan_is_wrong_and_is_null_in_the_file(tmp_path: Path) -> None:
    assert judge(DP, (float("nan"), 0.0, 0.0)) == WRONG
    gpus = {"ranks": 2, "gpus": 2, "devices": ["Simulated GPU"] * 2, "simulated": True}
    machine = {"accelerator": "gpu", "libraries": {"torch": "2"}, **gpus}
    finished = session.SelfTest(machine, [CellVerdict(DP, WRONG, (float("nan"), 0.0, 0.0))])
    verdicts.write(finished, tmp_path / "nan.json")
    assert json.loads((tmp_path / "nan.json").read_text())["cells"][0]["differences"][0] is None
    assert verdicts.table(finished).startswith("simulated GPU: 2 x Simulated GPU")


def test_what_hardware_lacks_is_named() -> None:
    float8 = next(cell for cell in all_cells(2) if cell.group == "fp8")
    assert (
        float8.missing(2, None, {})
        == float8.missing(2, (8, 6), {})
        == "needs a GPU with compute capability 8.9"
    )
    assert float8.missing(2, (9, 0), {}) is None
    assert float8.missing(2, (9, 0), {"fp8": "needs torchao"}) == "needs torchao"
    compiled = next(cell for cell in all_cells(2) if cell.group == "compile")
    assert compiled.missing(2, (9, 0), {"triton": "needs triton"}) == "needs triton", "on GPUs only"
    assert compiled.missing(2, None, {"triton": "needs triton"}) is None
    offloaded = next(cell for cell in all_cells(2) if cell.technique == "optimizer offloaded")
    assert offloaded.missing(2, None, {"zero": "needs DeepSpeed"}) == "needs DeepSpeed"


def test_list_starts_no_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "run", None)
    assert main(["selftest", "--list", "--only", "tp,zero", "cluster=local_cpu"]) == 0
    groups = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert groups == {"tp", "zero"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "tpp"], 'got "tpp"'),
        (["--ranks", "0"], "--ranks must be a whole number of at least 1"),
        (["--output", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["model=llama_tiny"], 'got "model=llama_tiny"'),
    ],
)
def test_bad_input_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["selftest", "cluster=local_cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_every_group_has_cells_and_names_are_unique() -> None:
    cells = all_cells(4)
    names = [cell.name for cell in cells]
    assert len(names) == len(set(names))
    assert chosen(cells, "cp") and all(cell.group == "cp" for cell in chosen(cells, "cp"))


def test_ranks_that_share_a_gpu_see_this_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes each for a host of its own."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [workers._shared_gpu(rank, 2)["CUDA_VISIBLE_DEVICES"] for rank in range(4)] == [
        "0",
        "1",
        "0",
        "1",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    assert [workers._shared_gpu(rank, 2)["CUDA_VISIBLE_DEVICES"] for rank in range(3)] == [
        "5",
        "GPU-7",
        "5",
    ]
    assert len({workers._shared_gpu(rank, 1)["NCCL_HOSTID"] for rank in range(4)}) == 4


@pytest.mark.parametrize(
    ("gpus", "options", "place"),
    [
        (2, [], (2, 2)),
        (2, ["--ranks", "4"], (2, 4)),
        (8, ["--ranks", "2"], (2, 2)),
        (0, [], (0, 4)),
    ],
)
def test_where_it_runs(
    gpus: int,
    options: list[str],
    place: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    asked = []

    def run(cells: object, ranks: int, gpus: int, seconds: float) -> session.SelfTest:
        asked.append((gpus, ranks))
        return session.SelfTest({"accelerator": "cpu", "cores": 1, "libraries": {"torch": "2"}}, [])

    monkeypatch.setattr(command, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(session, "run", run)
    assert main(["selftest", *options, "--output", str(tmp_path / "found.json")]) == 0
    assert asked == [place]
