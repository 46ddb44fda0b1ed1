"""What is installed, and what the Makefile does."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from command_line import REPOSITORY, environment

import lightning_3d

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is made of."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("lightning_3d", "conf", "recipes", "hydra_plugins"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "Makefile", "train.py"):
        shutil.copy(REPOSITORY / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> list[str]:
    """Names of the files in the wheel."""
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=checkout, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(checkout / "dist" / done.stdout.split()[-1]) as archive:
        return archive.namelist()


def test_wheel_has_all_code_and_configuration(wheel: list[str]) -> None:
    for folder, inside in (
        ("lightning_3d", "lightning_3d"),
        ("conf", "lightning_3d/conf"),
        ("recipes", "lightning_3d/recipes"),
        ("hydra_plugins", "hydra_plugins"),
    ):
        files = [path for path in (REPOSITORY / folder).rglob("*") if path.suffix in (".py", ".yaml", ".typed")]
        wanted = {f"{inside}/{path.relative_to(REPOSITORY / folder)}" for path in files}
        assert wanted - set(wheel) == set()


def test_wheel_takes_no_top_level_names_of_others(wheel: list[str]) -> None:
    top = {name.split("/")[0] for name in wheel if ".dist-info" not in name}
    assert top == {"lightning_3d", "hydra_plugins"}
    assert "hydra_plugins/__init__.py" not in wheel, "a namespace that other plugins share"


HIDDEN_PLUGINS = """
import sys
from hydra.core.plugins import Plugins
scan = Plugins._scan_all_plugins
Plugins._scan_all_plugins = staticmethod(lambda modules: scan([m for m in modules if m.__name__ != "hydra_plugins"]))
from lightning_3d.cli import main
sys.exit(main(["train", "recipe=llama_tiny_8xcpu", "cluster=h100_2x4", "parallelism=tp2_pp4", "trainer.dry=true"]))
"""


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
    assert PROJECT["scripts"] == {"lightning-3d": "lightning_3d.cli:entry_point"}
    assert any(name.endswith("entry_points.txt") for name in wheel)


def test_versions_agree() -> None:
    assert PROJECT["version"] == lightning_3d.__version__
    assert f"[{lightning_3d.__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_ranges_of_dependencies() -> None:
    promised = ["torch>=2.11,<2.16", "lightning>=2.6,<2.7", "deepspeed>=0.19,<0.20", "hydra-core>=1.3.2,<1.4"]
    assert set(promised) <= set(PROJECT["dependencies"])
    assert PROJECT["requires-python"] == ">=3.11"


def make_plan(checkout: Path, target: str) -> str:
    """What `make TARGET` would do."""
    done = subprocess.run(["make", "-n", target], cwd=checkout, capture_output=True, text=True, check=True, timeout=30)
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
    assert re.search(r"ruff check.*mypy.*pytest", make_plan(checkout, "test"), re.DOTALL)


def test_readme_commands_name_what_exists() -> None:
    """Overrides in the README's command lines are keys and options that exist."""
    from hydra import compose, initialize_config_dir

    from lightning_3d.config_files import conf_folder

    readme = (REPOSITORY / "README.md").read_text().replace('ARGS="', "").replace('"', "")
    lines = re.findall(r"train(?:\.py)? +((?:[\w.+~]+=\S+ *)+)", readme)
    assert lines
    for line in lines:
        overrides = [word for word in line.split() if not word.startswith("hydra.")]
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            compose("config", overrides=overrides)
