"""What is installed, what can be done with it outside of the checkout, and what the Makefile
does."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from command_line import REPOSITORY, environment
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

import lightning_3d

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is made of."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("lightning_3d", "conf", "recipes", "hydra_plugins"):
        shutil.copytree(
            REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "Makefile", "train.py"):
        shutil.copy(REPOSITORY / name, copy)
    return copy


def build(checkout: Path, what: str) -> Path:
    """Build a wheel, or an editable one, as pip does."""
    command = f"from setuptools import build_meta; print(build_meta.build_{what}('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return checkout / "dist" / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel_file(checkout: Path) -> Path:
    return build(checkout, "wheel")


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> list[str]:
    """Names of the files in the wheel."""
    with zipfile.ZipFile(wheel_file) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def installed(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and the packages of this one, but not what is installed here in
    editable mode."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path file names folders; path files inside those, by which editable installs work, are not
    # read.
    (packages / "packages.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("-packages"))
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "--disable-pip-version-check",
    ]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel_file)],
        check=True,
        timeout=120,
    )
    return folder / "bin"


def outside(
    command: list[str], folder: Path, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with nothing of the checkout on the path."""
    variables = environment()
    del variables["PYTHONPATH"]
    return subprocess.run(
        command,
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def test_wheel_has_all_code_and_configuration(wheel: list[str]) -> None:
    for folder, inside in (
        ("lightning_3d", "lightning_3d"),
        ("conf", "lightning_3d/conf"),
        ("recipes", "lightning_3d/recipes"),
        ("hydra_plugins", "hydra_plugins"),
    ):
        files = [
            path
            for path in (REPOSITORY / folder).rglob("*")
            if path.suffix in (".py", ".yaml", ".typed", ".j2", ".css", ".js")
        ]
        wanted = {f"{inside}/{path.relative_to(REPOSITORY / folder)}" for path in files}
        assert wanted - set(wheel) == set()


def test_wheel_takes_no_top_level_names_of_others(wheel: list[str]) -> None:
    top = {name.split("/")[0] for name in wheel if ".dist-info" not in name}
    assert top == {"lightning_3d", "hydra_plugins"}
    assert "hydra_plugins/__init__.py" not in wheel, "a namespace that other plugins share"


# Outside of the checkout


def test_installed_command_knows_groups_and_recipes(installed: Path, tmp_path: Path) -> None:
    where = outside(
        [str(installed / "python"), "-c", "import lightning_3d; print(lightning_3d.__file__)"],
        tmp_path,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed.parent), where.stderr
    done = outside(
        [
            str(installed / "lightning-3d"),
            "train",
            "recipe=llama3_70b_256xa100",
            "trainer.dry=true",
        ],
        tmp_path,
    )
    assert done.stdout.startswith(
        "tp8_pp4_dp8: 256 ranks on GPUs, 1F1B, ZeRO-1, full recomputation of one block in 2, bf16"
    ), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_installed_command_runs_the_main_job(installed: Path, tmp_path: Path) -> None:
    sizes = [
        "trainer.max_steps=2",
        "trainer.limit_val_batches=1",
        "data.sequence_length=32",
        "data.global_batch_size=8",
    ]
    done = outside(
        [str(installed / "lightning-3d"), "train", *sizes, "hydra.run.dir=run"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.startswith("tp2_pp2_dp2: 8 ranks on CPU")
        and (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 3
    )


COMPLETE = """
eval "$({command} -sc install=bash)"
ask() {{ COMP_LINE="lightning-3d $1"; COMP_CWORD=$2; hydra_bash_completion; echo "$1: ${{COMPREPLY[@]}}"; }}
export PATH={folder}:$PATH
complete -p lightning-3d
ask tr 1
ask "train cluster=h10" 2
ask "train recipe=llama3_70b_2" 2
ask "train trainer.dry=true parallelism.zero_st" 3
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_shell_completes_the_installed_command(installed: Path, tmp_path: Path) -> None:
    script = COMPLETE.format(command=installed / "lightning-3d", folder=installed)
    rule, *answers = outside(["bash", "-c", script], tmp_path).stdout.splitlines()
    assert rule.endswith("-F hydra_bash_completion lightning-3d")
    assert answers == [
        "tr: train",
        "train cluster=h10: cluster=h100 cluster=h100_32x8 cluster=h100_sxm",
        "train recipe=llama3_70b_2: recipe=llama3_70b_256xa100",
        "train trainer.dry=true parallelism.zero_st: parallelism.zero_stage=",
    ]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project of somebody else."""
    copy = tmp_path_factory.mktemp("project") / "project"
    shutil.copytree(
        REPOSITORY / "examples" / "lightning_hydra_template",
        copy,
        ignore=shutil.ignore_patterns("__pycache__", "logs"),
    )
    return copy


def losses(output: str) -> dict[str, float]:
    """What the project prints at the end."""
    return {
        name: float(value)
        for name, value in re.findall(r"(\w+/loss) (\d+\.\d+)", output.splitlines()[-1])
    }


NO_DEEPSPEED = "trainer.strategy.zero_stage=0"  # so that it need not be imported
QUICK = ["trainer.max_steps=4", "data.split=[256,32,32]", "data.shuffle=false"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layout", "devices"), [("pp2", 2), ("tp2_pp2", 4)])
@pytest.mark.full
def test_two_lines_train_another_project_in_other_dimensions(
    layout: str, devices: int, installed: Path, template: Path
) -> None:
    """And the losses are those of the project as it was."""
    train = [str(installed / "python"), "src/train.py", *QUICK]
    two_lines = [
        f"+parallelism@trainer.strategy={layout}",
        f"trainer.devices={devices}",
        NO_DEEPSPEED,
    ]
    one, three = outside(train, template), outside([*train, *two_lines], template)
    assert (one.returncode, three.returncode) == (0, 0), one.stderr + three.stderr
    assert losses(one.stdout).keys() == {"train/loss", "val/loss"}
    assert losses(three.stdout) == pytest.approx(losses(one.stdout), rel=1e-5)
    assert "lightning_3d" not in "".join(file.read_text() for file in template.glob("src/*.py"))


def test_layouts_are_options_of_the_other_project(template: Path) -> None:
    """The experiment is the same two lines, and a key that the strategy does not have is
    refused."""
    with initialize_config_dir(str(template / "configs"), version_base="1.3"):
        three = compose(
            "train",
            overrides=[
                "experiment=three_d",
                "parallelism@trainer.strategy=pp4_dp2",
                "trainer.strategy.vp=2",
            ],
        )
        with pytest.raises(HydraException, match="Could not override 'trainer.strategy.zero_stge'"):
            compose("train", overrides=["experiment=three_d", "trainer.strategy.zero_stge=1"])
    strategy = three.trainer.strategy
    assert (strategy._target_, strategy.layout, strategy.vp) == (
        "lightning_3d.Lightning3DStrategy",
        "pp4_dp2",
        2,
    )
    added = (template / "configs" / "experiment" / "three_d.yaml").read_text().splitlines()
    assert [
        line.strip() for line in added if not line.startswith(("#", "defaults", "trainer"))
    ] == [
        "- /parallelism@trainer.strategy: tp2_pp2_dp2",
        "devices: 8",
    ]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_other_project_on_eight_ranks_and_on_a_wrong_number(
    installed: Path, template: Path
) -> None:
    train = [str(installed / "python"), "src/train.py", *QUICK, "test=true"]
    one = losses(outside(train, template).stdout)
    assert "test/loss" in one
    assert losses(outside([*train, "experiment=three_d"], template).stdout) == pytest.approx(
        one, rel=1e-5
    )
    refused = outside([*train, "+parallelism@trainer.strategy=tp3", "trainer.devices=3"], template)
    assert refused.returncode == 1 and "tp 3 does not divide 4 heads" in refused.stderr


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_pip_installs_everything_in_an_empty_environment(wheel_file: Path, tmp_path: Path) -> None:
    """As a user without NVIDIA GPUs does: torch for the CPU first."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=300)
    bin_folder = tmp_path / "venv" / "bin"
    for package in ("torch==2.13.0", str(wheel_file)):
        done = outside(
            [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", package],
            tmp_path,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr
    (tmp_path / "empty").mkdir()
    done = outside(
        [str(bin_folder / "lightning-3d"), "train", "trainer.max_steps=5", "hydra.run.dir=run"],
        tmp_path / "empty",
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "empty" / "run" / "metrics.csv").read_text().count("\n") == 6


IN_ANOTHER_APP = """
import site, sys
site.addsitedir(sys.argv[1])
from hydra import compose, initialize_config_dir
with initialize_config_dir(sys.argv[2], version_base="1.3"):
    config = compose("config", overrides=["+parallelism=tp2_dp2", "+model=llama_tiny"])
print(config.parallelism.layout, config.model.name)
"""


@pytest.mark.slow
def test_hydra_finds_the_groups_of_an_editable_install(checkout: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(checkout, "editable")) as archive:
        archive.extractall(tmp_path / "packages")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "config.yaml").write_text("{}")
    command = [
        sys.executable,
        "-S",
        "-c",
        IN_ANOTHER_APP,
        str(tmp_path / "packages"),
        str(tmp_path / "app"),
    ]
    # without their path files
    paths = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "tp2_dp2 llama_tiny\n", done.stderr


HIDDEN_PLUGINS = """
import sys
from hydra.core.plugins import Plugins
scan = Plugins._scan_all_plugins
Plugins._scan_all_plugins = staticmethod(lambda modules: scan([m for m in modules if m.__name__ != "hydra_plugins"]))
from lightning_3d.app.cli import main
sys.exit(main(["train", "recipe=llama_tiny_8xcpu", "cluster=h100_2x4", "parallelism=tp2_pp4", "trainer.dry=true"]))
"""  # noqa: E501


@pytest.mark.slow
def test_command_line_works_where_hydra_cannot_discover_plugins(tmp_path: Path) -> None:
    """As in an editable install, where the names of the plugins' folder are mapped."""
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN_PLUGINS],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.startswith("tp2_pp4: 8 ranks"), done.stderr


def test_console_script(wheel: list[str]) -> None:
    assert PROJECT["scripts"] == {"lightning-3d": "lightning_3d.app.cli:entry_point"}
    assert any(name.endswith("entry_points.txt") for name in wheel)


def test_versions_agree() -> None:
    assert PROJECT["version"] == lightning_3d.__version__
    assert f"[{lightning_3d.__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_ranges_of_dependencies() -> None:
    promised = [
        "torch>=2.11,<2.16",
        "lightning>=2.6,<2.7",
        "deepspeed>=0.19,<0.20",
        "hydra-core>=1.3.2,<1.4",
    ]
    assert set(promised) <= set(PROJECT["dependencies"])
    assert PROJECT["requires-python"] == ">=3.11"


def make_plan(checkout: Path, target: str) -> str:
    """What `make TARGET` would do."""
    done = subprocess.run(
        ["make", "-n", target],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_installs_once(checkout: Path) -> None:
    first = make_plan(checkout, "train")
    assert "-m venv .venv" in first
    assert first.index("torch==2.13.0") < first.index("install -e .") < first.index("train.py")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    for stamp in ("bin/python", ".torch", ".installed", ".installed-test"):
        (checkout / ".venv" / stamp).touch()
    assert "install" not in make_plan(checkout, "train") + make_plan(checkout, "test")
    assert re.search(r"types style imports.*pytest", make_plan(checkout, "test"), re.DOTALL)
    checks = [make_plan(checkout, target) for target in ("types", "style", "imports")]
    assert [
        word in said
        for word, said in zip(("mypy", "ruff check", "lint-imports"), checks, strict=True)
    ] == [True] * 3
