"""Projects rendered from the template are complete, and those that start from either network
train."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from command_line import environment
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from project_template import QUESTIONS, TEMPLATE, answers, render

from lightning_3d import Layout
from lightning_3d.models.parallel_plan import read_plan

NETWORKS = sorted(QUESTIONS["network"]["choices"].values())


@pytest.fixture(scope="module", params=NETWORKS)
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render(
        tmp_path_factory.mktemp("projects") / request.param,
        project_name="Nice model",
        network=request.param,
    )


def test_a_project_is_complete_and_clean(project: Path) -> None:
    files = {str(file.relative_to(project)) for file in project.rglob("*") if file.is_file()}
    assert {
        "README.md",
        "pyproject.toml",
        ".gitignore",
        "nice_model/train.py",
        "nice_model/network.py",
        "configs/train.yaml",
    } <= files
    assert (
        f"configs/model/{'gpt' if project.name == 'own' else 'llama'}.yaml" in files
        and len(files) == 15
    )
    for name in files:
        text = (project / name).read_text()
        assert "{{" not in text and "{%" not in text and not name.endswith(".jinja"), name
        assert not text or text.endswith("\n") and not text.endswith("\n\n"), name
    assert (
        tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"] == "nice-model"
    )
    style = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--line-length",
        "140",
        "--select",
        "E,F,W,I,UP,B",
        ".",
    ]
    done = subprocess.run(style, cwd=project, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_its_configuration_composes_in_every_layout_that_is_offered(project: Path) -> None:
    with initialize_config_dir(str(project / "configs"), version_base="1.3"):
        for layout in QUESTIONS["layout"]["choices"]:
            cfg = compose(
                "train",
                overrides=[
                    f"parallelism@trainer.strategy={layout}",
                    "experiment=small",
                    "logger=csv",
                ],
            )
            assert (
                Layout.parse(cfg.trainer.strategy.layout).name == layout
                and cfg.trainer.max_steps == 4
            )
        assert compose("train").trainer.strategy.layout == answers()["layout"]


def test_its_network_has_a_plan(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(project)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nice_model"]:
        monkeypatch.delitem(sys.modules, name)
    with initialize_config_dir(str(project / "configs"), version_base="1.3"):
        cfg = compose("train")
    module = instantiate(cfg.model)
    module.configure_model()
    plan = read_plan(module.network)
    assert plan.layers and {cut.style for cut in plan.tp.values()} >= {"colwise", "rowwise"}


@pytest.mark.parametrize("name", ["2d", "My_Model", "a b", "a.b"])
def test_a_name_that_is_no_package_is_refused(name: str) -> None:
    assert answers(project_name="GPT for me")["package_name"] == "gpt_for_me"
    with pytest.raises(ValueError, match="Use lower-case letters"):
        answers(package_name=name)


def test_questions_offer_what_works() -> None:
    assert all(
        question["help"] and question["type"] == "str" and "default" in question
        for question in QUESTIONS.values()
    )
    assert (
        QUESTIONS["network"]["default"] in NETWORKS
        and QUESTIONS["layout"]["default"] in QUESTIONS["layout"]["choices"]
    )
    assert yaml.safe_load((TEMPLATE / "copier.yml").read_text())["_subdirectory"] == "project"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_tests_of_a_project_pass(project: Path) -> None:
    """They train 2 steps on dp2 and on one process."""
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(project), variables["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        cwd=project,
        env=variables,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-4000:]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_project_trains_in_three_dimensions(project: Path, tmp_path: Path) -> None:
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(project), variables["PYTHONPATH"]])
    quick = [
        "experiment=small",
        "trainer.max_steps=2",
        "parallelism@trainer.strategy=tp2_pp2",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    command = [sys.executable, "-m", "nice_model.train", *quick]
    done = subprocess.run(
        command, cwd=project, env=variables, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0 and "val_loss" in done.stdout, done.stderr[-4000:]
