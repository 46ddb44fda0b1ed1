"""The examples run as their first lines say."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from command_line import REPOSITORY, environment

from lightning_3d.checkpoint import load_full_state_dict

EXAMPLES = REPOSITORY / "examples"


def run(name: str, folder: Path, *arguments: str) -> str:
    """What an example prints, run in an empty folder."""
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / name), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_every_example_is_in_the_table_and_tested() -> None:
    names = {
        path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")
    }
    table = (EXAMPLES / "README.md").read_text()
    assert {name for name in names if f"examples/{name}`" in table or f"({name})" in table} == names
    tests = Path(__file__).read_text() + (Path(__file__).with_name("test_packaging.py")).read_text()
    assert {name for name in names if f'"{name}"' in tests} == names


@pytest.mark.full
def test_lora(tmp_path: Path) -> None:
    output = run(
        "lora.py",
        tmp_path,
        "--layout",
        "tp2",
        "--devices",
        "2",
        "--steps",
        "20",
        "--checkpoint",
        "lora.ckpt",
    )
    losses = {
        int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\d+\.\d+)", output)
    }
    assert list(losses) == [10, 20] and losses[20] < losses[10] < 4.6
    state = load_full_state_dict(tmp_path / "lora.ckpt")
    adapters = sum(value.numel() for name, value in state.items() if ".lora_" in name)
    assert (
        f"trained {adapters} of {sum(value.numel() for value in state.values())} parameters"
        in output
    )


@pytest.mark.full
def test_fine_tuned_checkpoint_generates_with_transformers(tmp_path: Path) -> None:
    """It has learned to count."""
    output = run("finetune.py", tmp_path)
    assert "generated 11 12 13 14 15 16 17 18 19 20" in output
    assert (tmp_path / "outputs" / "finetuned" / "huggingface" / "model.safetensors").is_file()


def custom_module(folder: Path, layout: str, devices: int) -> tuple[float, float]:
    output = run("custom_module.py", folder, "--layout", layout, "--devices", str(devices))
    ((loss, accuracy),) = re.findall(r"loss after 30 steps: (\d\.\d+), accuracy (\d\.\d+)", output)
    return float(loss), float(accuracy)


@pytest.mark.full
def test_custom_module(tmp_path: Path) -> None:
    loss, accuracy = custom_module(tmp_path, "tp2", 2)
    assert loss < 0.5 and accuracy > 0.8


@pytest.mark.full
def test_custom_module_in_three_dimensions(tmp_path: Path) -> None:
    """Whatever the layout, the same loss."""
    one, _ = custom_module(tmp_path, "tp1", 1)
    assert [
        custom_module(tmp_path, *layout)[0] for layout in (("tp4", 4), ("tp2_pp2_dp2", 8))
    ] == pytest.approx([one, one], abs=2e-4)


@pytest.mark.full
def test_own_trainer(tmp_path: Path) -> None:
    (loss,) = re.findall(r"loss after 20 steps: (\d\.\d+)", run("own_trainer.py", tmp_path))
    assert float(loss) < 4.0
    marked = [
        line
        for line in (EXAMPLES / "own_trainer.py").read_text().splitlines()
        if line.endswith(("# this line", "# and this"))
    ]
    assert len(marked) == 2 and all("Lightning3DStrategy" in line for line in marked)


@pytest.mark.slow
def test_plain_loop(tmp_path: Path) -> None:
    """Alone, and under torchrun: the same loss and as many parameters."""
    shown = r"loss after 10 steps: (\d\.\d+), (\d+) parameters"
    ((loss, parameters),) = re.findall(shown, run("plain_loop.py", tmp_path, "--steps", "10"))
    arguments = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        str(EXAMPLES / "plain_loop.py"),
        "tp2_pp2",
        "--steps",
        "10",
    ]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    ((other, counted),) = re.findall(shown, done.stdout)
    assert float(other) == pytest.approx(float(loss), abs=2e-3) and counted == parameters


@pytest.mark.slow
def test_fabric_loop(tmp_path: Path) -> None:
    (loss,) = re.findall(r"loss after 20 steps: (\d\.\d+)", run("fabric_loop.py", tmp_path))
    assert float(loss) < 4.0


@pytest.mark.full
@pytest.mark.parametrize("name", ["lightning_3d", "lightning_3d.Lightning3DStrategy"])
def test_lightning_cli(name: str, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    options = [
        "--trainer.devices=2",
        "--trainer.max_steps=20",
        f"--trainer.strategy={name}",
        "--trainer.strategy.layout=dp2",
    ]
    (loss,) = re.findall(
        r"loss after 20 steps: (\d\.\d+)", run("lightning_cli.py", tmp_path, "fit", *options)
    )
    assert float(loss) < 4.5


@pytest.mark.full
def test_mixture(tmp_path: Path) -> None:
    output = run("mixture.py", tmp_path)
    rows = re.findall(
        r"step (\d+): loss (\d\.\d+), fullest expert of each layer (\d\.\d+), (\d\.\d+) x the mean",
        output,
    )
    assert [row[0] for row in rows] == ["10", "20", "30"]
    assert float(rows[-1][1]) < float(rows[0][1]) and all(
        1 <= float(load) <= 4 for row in rows for load in row[2:]
    )


@pytest.mark.full
@pytest.mark.timeout(600)
def test_sweep(tmp_path: Path) -> None:
    output = run("sweep.py", tmp_path)
    (folder,) = (tmp_path / "outputs").iterdir()
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and (folder / "sweep.html").is_file()
    assert (
        f"smallest validation loss: {min(float(row['val_loss']) for row in rows):.4f} by job"
        in output
    )


def notebook() -> dict:
    return json.loads((EXAMPLES / "layouts.ipynb").read_text())


def test_the_notebook_has_no_output_of_any_machine() -> None:
    assert not any(
        cell.get("outputs") or cell.get("execution_count") for cell in notebook()["cells"]
    )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells, one after the other, in this process. What shows the report is there in notebooks
    only."""
    shown = []
    display = ModuleType("IPython.display")
    display.IFrame = lambda path, **_: shown.append(path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    there: dict[str, object] = {}
    for cell in notebook()["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), there)
    output = capsys.readouterr().out
    differences = [float(number) for number in re.findall(r"difference (\S+)", output)]
    assert len(differences) == 12 and max(differences) < 1e-4
    assert "tp2_pp2_dp2: 8 ranks on CPU" in output and re.search(
        r"bubble \d+\.\d%, fullest rank \d+\.\d MiB", output
    )
    assert "steps ['13', '14']" in output, "resumed in another layout"
    assert output.count("skipped: parallelism=tp3") == 2 and re.search(
        r"best: job \d, (dp2|tp2), lr \d\.0?\d*", output
    )
    assert shown == ["outputs/notebook/three_d/report.html", "outputs/notebook/sweep/sweep.html"]
    assert all((tmp_path / page).is_file() for page in shown)
