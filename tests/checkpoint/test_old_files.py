"""Files that version 2ac7856 left: a run folder, a sweep, checkpoints of a script and of another
program.

The code of today resumes, exports or shows each, and computes the numbers that 2ac7856 computed.

`old_files/2ac7856/README.md` has the commands that made them; `numbers.json` there has what 2ac7856
computed when it ran to the end.
"""

import csv
import inspect
import json
import pkgutil
import re
import sys
import tarfile
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import REPOSITORY, Result, run_commands
from ranks import run_ranks
from starts import in_fresh_process

OLD = REPOSITORY / "tests" / "old_files" / "2ac7856"
NUMBERS = json.loads((OLD / "numbers.json").read_text())
COMMANDS = (
    "train",
    "run",
    "plan",
    "profile",
    "dryrun",
    "verify",
    "launch",
    "export",
    "import",
    "inspect",
    "report",
)
MADE_IN = "/tmp/run"
FLOAT32 = 1e-5
"""Largest relative difference of losses and gradient norms. The same layout on another machine
rounds differently too."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def unpack(name: str, folder: Path) -> Path:
    """Unpack `name` in `folder`, and replace its old place in configurations and the sweep's table,
    as a user who moves a folder does."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(OLD / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    corpus = (f"{MADE_IN}/corpus.bin", str(OLD / "corpus.bin"))
    for path in (
        path
        for file in ("config.yaml", "overrides.yaml", "sweep.csv")
        for path in (folder / name).rglob(file)
    ):
        path.write_text(path.read_text().replace(*corpus).replace(f"{MADE_IN}/", f"{folder}/"))
    return folder / name


def overrides(run: Path) -> list[str]:
    """The command line of a run, from Hydra's files."""
    return yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text())


def again(run: Path, *changes: str) -> list[str]:
    """Arguments that resume a run in its folder: its own command line with some changes."""
    keys = {change.split("=")[0] for change in changes}
    kept = [override for override in overrides(run) if override.split("=")[0] not in keys]
    return ["train", *kept, *changes, f"hydra.run.dir={run}", "trainer.auto_resume=true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("old")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    """The checkpoint that the interrupted run saved."""
    (found,) = unpack("run", folder / "kept").glob("checkpoints/step_*.ckpt")
    return found


@pytest.fixture(scope="module")
def results(folder: Path, checkpoint: Path) -> dict[str, Result]:
    """Run all command lines on the old files, one after the other in one process."""
    run, other, sweep = (
        unpack("run", folder),
        unpack("run", folder / "other"),
        unpack("sweep", folder),
    )
    shown, compared = unpack("run", folder / "shown"), unpack("sweep", folder / "compared")
    lines = {
        "report": ["report", str(shown)],
        "sweep report": ["report", str(compared)],
        "inspect": ["inspect", str(checkpoint)],
        "export": ["export", str(checkpoint), "--output", str(folder / "exported_now")],
        "run": ["run", str(run / "config.yaml"), "--resume"],
        "other layout": again(other, "parallelism=pp2", "parallelism.schedule=gpipe"),
        "job": again(sweep / "0", "trainer.max_steps=8"),
        **{f"{name} --help": [name, "--help"] for name in COMMANDS},
    }
    return dict(zip(lines, run_commands(list(lines.values()), timeout=550, warm=True), strict=True))


@pytest.fixture(scope="module")
def script() -> Any:
    """The module of the old script."""
    return load_script()


def load_script() -> Any:
    spec = spec_from_file_location("old_script", OLD / "script.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fit_old_script(*arguments: Any, **settings: Any) -> dict[int, float]:
    """Call `fit` of the old script, on a rank."""
    return load_script().fit(*arguments, **settings)


def rows(run: Path) -> dict[str, dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return {row["step"]: row for row in csv.DictReader(file)}


def compare_rows(run: Path, name: str, after: int) -> None:
    """Check that a run has each step once, and that the steps after `after`, computed today, agree
    with those of the old version."""
    found, expected = rows(run), NUMBERS[name]
    assert list(found) == list(expected)
    for step, numbers in expected.items():
        tolerance = FLOAT32 if int(step) > after else 0
        assert {column: float(found[step][column]) for column in numbers} == pytest.approx(
            numbers, rel=tolerance
        ), f"step {step}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step_"))


# The run folder


def test_old_run_resumes_in_its_layout(
    results: dict[str, Result], folder: Path, checkpoint: Path
) -> None:
    assert results["run"].code == 0, results["run"].output
    assert 3 <= step_of(checkpoint) < 20
    compare_rows(folder / "run", "run", step_of(checkpoint))
    assert (folder / "run" / "checkpoints" / "step_20.ckpt" / "manifest.json").is_file()


def test_old_run_resumes_in_another_layout(
    results: dict[str, Result], folder: Path, checkpoint: Path
) -> None:
    assert results["other layout"].code == 0, results["other layout"].output
    assert "pp2: 2 ranks on CPU, GPipe" in results["other layout"].output
    compare_rows(folder / "other" / "run", "run", step_of(checkpoint))


def test_report_of_an_old_run(results: dict[str, Result], folder: Path) -> None:
    assert results["report"].code == 0, results["report"].output
    page = (folder / "shown" / "run" / "report.html").read_text()
    last = list(rows(folder / "shown" / "run").values())[-1]
    assert f"{float(last['loss']):.5g}"[:5] in page and "tp2_pp2_dp2" in page


# Its checkpoint


def test_inspect_reads_an_old_checkpoint(results: dict[str, Result], checkpoint: Path) -> None:
    assert results["inspect"].code == 0, results["inspect"].output
    shown = re.sub(r"\s+", " ", results["inspect"].output)
    tensors = ("39 tensors, 2,888 numbers, float32", "117 tensors, float32")
    for part in (f"step {step_of(checkpoint)}", "tp2_pp2_dp2", *tensors, "complete yes"):
        assert part in shown


def test_weights_of_an_old_checkpoint(
    results: dict[str, Result], folder: Path, checkpoint: Path
) -> None:
    """`load_full_state_dict` and today's export give the tensors that the old version exported, bit
    by bit."""
    from safetensors.torch import load_file

    from lightning_3d.checkpoint import load_full_state_dict

    assert results["export"].code == 0, results["export"].output
    old, now = (
        load_file(unpack("exported", folder) / "model.safetensors"),
        load_file(folder / "exported_now" / "model.safetensors"),
    )
    loaded = {
        name.removeprefix("model."): value
        for name, value in load_full_state_dict(checkpoint).items()
    }
    assert len(old) == 39 and list(old) == list(now)
    for name, value in old.items():
        assert torch.equal(value, now[name]) and torch.equal(value, loaded[name]), name
    old_config, config = (
        json.loads((folder / name / "config.json").read_text())
        for name in ("exported", "exported_now")
    )
    assert {**old_config, "transformers_version": ""} == {**config, "transformers_version": ""}


# The sweep


def test_report_of_an_old_sweep(results: dict[str, Result], folder: Path) -> None:
    assert results["sweep report"].code == 0, results["sweep report"].output
    page = (folder / "compared" / "sweep" / "sweep.html").read_text()
    assert '"report": "0/report.html"' in page and '"report": "1/report.html"' in page
    with (folder / "compared" / "sweep" / "sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["parallelism"], row["status"]) for row in table] == [
        ("dp2_ep2", "finished"),
        ("pp2", "finished"),
    ]
    assert table[0]["val_loss"] in page and table[1]["val_loss"] in page
    for job in ("0", "1"):
        assert "mixtral_tiny" in (folder / "compared" / "sweep" / job / "report.html").read_text()


def test_finished_job_of_an_old_sweep_is_extended(results: dict[str, Result], folder: Path) -> None:
    """A mixture of experts in bf16: the checkpoint has float32 master weights and experts of two
    ranks."""
    assert results["job"].code == 0, results["job"].output
    compare_rows(folder / "sweep" / "0", "sweep/0", after=4)
    with (folder / "sweep" / "0" / "routers.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)][::2] == ["2", "4", "6", "8"]


# Scripts


def test_old_checkpoint_of_a_script_resumes(folder: Path) -> None:
    """ZeRO stage 3, two parameter groups, a schedule, and an epoch that the old version
    shuffled."""
    saved = unpack("script", folder) / "step_5.ckpt"
    found = run_ranks(
        fit_old_script, 2, str(folder / "fit"), str(saved), zero_stage=3, process_group=False
    )
    expected = {int(step): loss for step, loss in NUMBERS["script"].items() if int(step) > 5}
    assert found[0] == found[1] == pytest.approx(expected, rel=FLOAT32)
    assert list(found[0]) == list(range(6, 13))


def test_old_conversion_of_a_plain_checkpoint_resumes(folder: Path) -> None:
    saved = unpack("converted.ckpt", folder)
    found = run_ranks(
        fit_old_script,
        2,
        str(folder / "fit_plain"),
        str(saved),
        shuffle=False,
        zero_stage=1,
        process_group=False,
    )
    expected = {int(step): loss for step, loss in NUMBERS["plain"].items() if int(step) > 5}
    assert found[0] == found[1] == pytest.approx(expected, rel=FLOAT32)


# Names


def test_commands_are_there(results: dict[str, Result]) -> None:
    ends = {
        name: (results[f"{name} --help"].code, results[f"{name} --help"].output)
        for name in COMMANDS
    }
    assert {name: code for name, (code, _) in ends.items()} == dict.fromkeys(COMMANDS, 0)
    assert [name for name, (_, text) in ends.items() if f"lightning-3d {name}" not in text] == []
    (shown,) = run_commands([["--help"]], warm=True)
    assert shown.code == 0 and all(
        re.search(rf"^ +{name} ", shown.output, re.MULTILINE) for name in COMMANDS
    )


@pytest.mark.parametrize("name", NUMBERS["public"])
def test_public_name(name: str) -> None:
    """Each name is the class or function that it was, with the parameters that it had."""
    value, old = located(name), NUMBERS["public"][name]
    assert value.__name__ == name.rpartition(".")[2]
    if old["kind"] == "error":
        assert issubclass(value, Exception)
        return
    assert kind(value) == old["kind"]
    assert set(old["parameters"]) <= set(inspect.signature(value).parameters)


def kind(value: Any) -> str:
    """Name the kind of a public name's value: "class", "function" or, by mistake, "module"."""
    return "class" if inspect.isclass(value) else type(value).__name__


KERNELS = "lightning_3d.parallel.zero.outside_writes_kernel"
"""A module that imports Triton, which only torch's builds for GPUs bring."""


def kinds_after_all_imports() -> dict[str, str]:
    """Import all modules of a freshly imported package, then name the kind of each public name. For
    a process of its own."""
    for name in [name for name in sys.modules if name.split(".")[0] == "lightning_3d"]:
        del sys.modules[name]
    package = import_module("lightning_3d")
    for module in pkgutil.walk_packages(package.__path__, "lightning_3d."):
        if not module.name.endswith("__main__") and (
            module.name != KERNELS or find_spec("triton") is not None
        ):
            import_module(module.name)
    names = {f"lightning_3d.{name}" for name in package.__all__ if name != "__version__"}
    names |= {name for name in NUMBERS["public"] if name.startswith("lightning_3d.")}
    return {name: kind(located(name)) for name in sorted(names)}


def test_importing_modules_changes_no_public_name() -> None:
    """A module with the name of a public function replaces it in the package as soon as the module
    is imported."""
    found = in_fresh_process(kinds_after_all_imports)
    assert found == {name: kind(located(name)) for name in found}
    assert set(found.values()) == {"class", "function"}


def located(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def targets(value: Any) -> set[str]:
    """Each `_target_` below a value of a configuration."""
    if isinstance(value, list):
        return set().union(*map(targets, value))
    if not isinstance(value, dict):
        return set()
    own = {value["_target_"]} if "_target_" in value else set()
    return own.union(*map(targets, value.values()))


def test_targets_in_old_runs(folder: Path) -> None:
    """Targets of frozen configurations and launchers exist. (No later command reads
    `hydra.callbacks` of a run.)"""
    found: set[str] = set()
    for name in ("run", "sweep"):
        for path in unpack(name, folder / "targets").rglob("*.yaml"):
            content = yaml.safe_load(path.read_text())
            if isinstance(content, dict):
                hydra = content.get("hydra", {})
                hydra.pop("callbacks", None)
                found |= targets(content)
    ours = {name for name in found if name.startswith(("lightning_3d", "hydra_plugins"))}
    assert {
        "lightning_3d.Lightning3DStrategy",
        "hydra_plugins.lightning_3d_launcher.launcher.Lightning3DLauncher",
    } < ours
    assert {located(name).__name__ for name in ours} == {name.rpartition(".")[2] for name in ours}


def configuration_keys(value: Any, above: str = "") -> set[str]:
    inner = {key: value[key] for key in value if isinstance(value[key], dict)}
    return {f"{above}{key}" for key in value} | {
        key for name in inner for key in configuration_keys(inner[name], f"{above}{name}.")
    }


def test_configuration_has_all_old_keys() -> None:
    paths = {name: REPOSITORY / f"{name}.yaml" for name in NUMBERS["options"]}
    assert [name for name, path in paths.items() if not path.is_file()] == []
    for name, old in NUMBERS["keys"].items():
        assert set(old) <= configuration_keys(yaml.safe_load(paths[name].read_text()) or {}), name
