"""README and docs: every block of code and every command is right, pages are built without a
warning, and references are not stale.

By default commands are composed and checked as the command line would, Python is run where it needs
no folder of weights, and refusals are compared with what is shown. `test_docs_run.py` runs the
commands.
"""

import ast
import builtins
import contextlib
import functools
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from command_line import REPOSITORY, environment, run_commands
from documented import (
    ALL,
    FILES,
    LANGUAGES,
    NEEDS,
    NOTES,
    PAGES,
    Block,
    Command,
    commands,
    here,
    sandbox,
    single_runs,
    train_arguments,
    unfenced,
    without_options,
)
from hydra import compose, initialize_config_dir
from ranks import run_ranks

from lightning_3d.app.cli.launch import run as launch
from lightning_3d.app.cli.main import main
from lightning_3d.app.cli.verify import split_script
from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.runs.check import check_for

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
COMMANDS = [command for block in ALL for command in commands(block)]
SHOWN = [command for command in COMMANDS if command.block.language == "console"]
PYTHON = [block for block in ALL if block.language == "python"]


def script(name: str) -> Any:
    """A Python file of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(
        f"docs_{name}", REPOSITORY / "docs" / f"{name}.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Blocks


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        assert not unfenced(page), f"{page.name}: indented code, in lines {unfenced(page)}"
    for block in ALL:
        assert block.language in LANGUAGES, f"{block.place}: the language is {block.language!r}"
        assert set(block.notes) <= set(NOTES), f"{block.place}: {block.notes}"
        assert block.notes.get("needs", "GPU") in NEEDS, f"{block.place}: {block.notes}"
    assert len(COMMANDS) > 50 and len(PYTHON) > 8


# Commands


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands name: files of the documentation, and a folder of pretrained weights."""
    return sandbox(tmp_path_factory.mktemp("documented"))


def check_run(overrides: list[str], needs: str | None, folder: Path) -> None:
    """Compose and check as `trainer.dry=true` does."""
    if needs == "GPU" and any(word.startswith("model.pretrained=") for word in overrides):
        # of a size that is not here
        overrides = [word for word in overrides if not word.startswith("model.pretrained=")]
    overrides = [
        word.replace("file://mine", f"file://{folder}/mine") for word in here(overrides, folder)
    ]
    # what Hydra's own keys name is no part of the composition
    own = [
        word for word in overrides if not word.startswith(("hydra.", "hydra/", "trainer.resume="))
    ]
    path = [word for word in overrides if word.startswith("hydra.searchpath=")]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose("config", overrides=[*path, *own, "++trainer.dry=true"])
    if needs != "network":  # where packages are to be installed first
        check_for(config)


def check_command(command: Command, folder: Path) -> None:
    """Refuse a command that cannot be right."""
    words = list(command.words)
    while words and re.fullmatch(r"[A-Z_0-9]+=\S*", words[0]):
        words.pop(0)
    arguments = train_arguments(words)
    if arguments is not None:
        for overrides in single_runs(arguments):
            check_run(overrides, command.block.notes.get("needs"), folder)
    elif words[0] == "lightning-3d":
        check_subcommand(words[1], words[2:], folder)
    elif words[:3] == ["pip", "install", "-e"]:
        assert words[3:] == ["."]
    elif words[:2] == ["pip", "install"]:
        extra = re.fullmatch(r"lightning-3d\[(\w+)\]", words[2])
        assert words[2:] == ["copier"] or (extra and extra[1] in PROJECT["optional-dependencies"])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "python":
        assert words[1] in FILES or (REPOSITORY / words[1]).is_file()
    elif words[:2] == ["copier", "copy"]:
        assert (REPOSITORY / words[2] / "copier.yml").is_file()
    else:
        assert words[0] in ("git", "cd"), "a command that no test knows"


@functools.cache
def help_of(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_3d", name, "--help"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    return done.stdout


def check_subcommand(name: str, arguments: list[str], folder: Path) -> None:
    """Of `lightning-3d`, other than train."""
    if name == "launch":
        assert (
            launch([*here(arguments, folder), *(() if "--dry" in arguments else ("--dry",))]) == 0
        )
    elif name == "verify" and (script := split_script(arguments))[1]:
        import_module("lightning_3d.app.cli.verify").COMMAND.parse(script[0])
    elif name in ("plan", "profile", "dryrun", "verify"):
        _, overrides = import_module(f"lightning_3d.app.cli.{name}").COMMAND.parse(arguments)
        if name == "plan":  # which chooses the layout
            size = re.search(r"cluster=\w+_(\d+)x(\d+)", " ".join(overrides))
            ranks = int(size[1]) * int(size[2]) if size else 1
            overrides = [
                *overrides,
                f"parallelism=dp{ranks}",
                "parallelism.micro_batch_size=1",
                "force=true",
            ]
        check_run(
            without_options([word for word in overrides if not word.startswith("rank=")]),
            None,
            folder,
        )
    elif name == "selftest":
        assert main([name, *arguments, "--list"]) == 0
    else:
        others = (
            "run",
            "doctor",
            "draft-plan",
            "evaluate",
            "export",
            "generate",
            "import",
            "inspect",
            "report",
            "tokenize",
        )
        assert name in others, f"there is no lightning-3d {name}"
        text = help_of(name)
        for option in (word for word in arguments if word.startswith("--")):
            assert option in text


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({command.block.page for command in COMMANDS}))
def test_commands_are_right(
    page: str, folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their keys, options and layouts are taken, each alone and together."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(folders)
    for command in COMMANDS:
        if command.block.page == page and command.block.language == "bash":
            try:
                check_command(command, folders)
            except BaseException as error:
                error.add_note(f"{command.name}\n{capsys.readouterr().err}")
                raise


@pytest.mark.slow
def test_refusals_are_as_shown() -> None:
    """`...` stands for anything."""
    assert len(SHOWN) > 10
    for command, done in zip(
        SHOWN, run_commands([command.words[1:] for command in SHOWN]), strict=True
    ):
        assert command.words[0] == "lightning-3d"
        pattern = ".*?".join(map(re.escape, command.output.split("...")))
        assert re.fullmatch(pattern, done.output.strip("\n"), re.DOTALL), (
            f"{command.name} prints\n{done.output}"
        )
        assert done.code == 2 and not done.left


# Python


def names_of(tree: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, kind)
    }


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_names_of_a_python_block_are_given(block: Block) -> None:
    tree = ast.parse(block.text)
    made = names_of(tree, ast.Store) | {
        node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            made |= {(name.asname or name.name).partition(".")[0] for name in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
    unknown = names_of(tree, ast.Load) - made - set(block.given) - set(dir(builtins)) - {"__name__"}
    assert not unknown, f"{block.place} uses {sorted(unknown)}"


def run_block(text: str, given: list[str], folder: str) -> None:
    """On each rank."""
    from documented_names import checkpoint, made

    with contextlib.chdir(folder):
        if (resumed := re.search(r'ckpt_path="([^"]+)"', text)) and not Path(resumed[1]).exists():
            checkpoint(Path(resumed[1]))
        scope = {"__name__": "documented", **made(given)}
        exec(compile(text, "block", "exec"), scope)
        if "configure_model" in scope:
            module = SimpleNamespace(model=None)
            scope["configure_model"](module)
            assert module.model is not None


QUICK = ("README.md", "docs/report.md")


CASES = [
    pytest.param(block, id=block.place, marks=() if block.page in QUICK else pytest.mark.full)
    for block in PYTHON
    if "__main__" not in block.text  # a script, of test_docs_run.py
]


@pytest.mark.slow
@pytest.mark.parametrize("block", CASES)
def test_python_runs(block: Block, tmp_path: Path) -> None:
    run_ranks(
        run_block,
        int(block.notes.get("ranks", "1")),
        block.text,
        block.given,
        str(tmp_path),
        process_group=False,
    )


def test_hydra_block_composes(tmp_path: Path) -> None:
    """Of an app that is not ours."""
    (block,) = (block for block in ALL if block.given == ["hydra app"])
    content = yaml.safe_load(block.text)
    content["defaults"].append("_self_")
    (tmp_path / "app.yaml").write_text(yaml.safe_dump(content))
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("app", overrides=["trainer.strategy.schedule=GPipe"])
    assert config.trainer.devices == 8 and config.trainer.strategy.layout == "tp2_pp2_dp2"


# Pages


@pytest.mark.slow
def test_reference_is_not_stale() -> None:
    """`python docs/reference.py` would change nothing."""
    reference = script("reference")
    pages = [
        page
        for page in (REPOSITORY / "docs").glob("*.md")
        if "<!-- generated: " in page.read_text()
    ]
    assert {page.name for page in pages} >= {"configuration.md", "recipes.md"}
    for page in pages:
        assert reference.filled(page.read_text("utf-8")) == page.read_text("utf-8"), (
            f"{page.name}: run python docs/reference.py"
        )
    parts = re.findall(r"<!-- generated: ([\w/]+) -->", "".join(page.read_text() for page in pages))
    assert sorted(parts) == sorted(reference.PARTS)


def documented_keys() -> set[str]:
    return set(
        re.findall(
            r"^\| `([\w.]+)` \|",
            (REPOSITORY / "docs" / "configuration.md").read_text(),
            re.MULTILINE,
        )
    )


def test_reference_has_every_key() -> None:
    """Of the composed configuration, whatever the reference was made of."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose("config", overrides=["cluster=h100_sxm"])
    groups = ("parallelism", "trainer", "cluster", "optimizer", "precision", "data")
    keys = {f"{group}.{key}" for group in groups for key in leaves(config[group])} | {
        "seed",
        "force",
        "run_folder",
    }
    assert {key for key in keys if not key.rpartition(".")[2].startswith("_")} - {
        "data.name"
    } <= documented_keys()


def leaves(config: Any, prefix: str = "") -> Iterator[str]:
    for key in config:
        value = config._get_node(key)
        if hasattr(value, "keys") and len(value):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


KEY = re.compile(
    r"`((?:parallelism|trainer|cluster|optimizer|precision)\.[\w.]+)=[^`]*`|`(parallelism\.[\w.]+)`"
)


def test_keys_in_the_text_exist() -> None:
    known = documented_keys()
    for page in PAGES:
        for key in ("".join(pair) for pair in KEY.findall(page.read_text("utf-8"))):
            assert key in known or key == "parallelism.KEY", f"{page.name} names {key}"


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (REPOSITORY / "README.md").read_text()):
        assert (REPOSITORY / target).exists(), target
    assert (REPOSITORY / "docs" / "images" / "report.png").stat().st_size < 200_000


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("material") is None,
    reason='Not installed: pip install "lightning-3d[docs]"',
)
def test_pages_are_built_without_a_warning(tmp_path: Path) -> None:
    """And ask no host for anything."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    nothing = {
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "NO_MKDOCS_2_WARNING": "1",
    }
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment(**nothing),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {page.name: page.read_text("utf-8") for page in (tmp_path / "site").glob("*.html")}
    assert {f"{page.stem}.html" for page in PAGES[1:]} <= set(pages)
    for name, text in pages.items():
        loaded = re.findall(
            r"<(?:script|img|iframe|source)[^>]*?src=\"?([^\" >]+)|<link[^>]*?href=\"?([^\" >]+)",
            text,
        )
        assert not [a or b for a, b in loaded if (a or b).startswith(("http:", "https:", "//"))], (
            name
        )


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_paths_that_contributors_read_exist(page: str) -> None:
    roots = [REPOSITORY, REPOSITORY / "lightning_3d", REPOSITORY / "tests" / "support"]
    named = re.findall(r"`([\w./]+\.(?:py|md|toml|yaml))`", (REPOSITORY / page).read_text())
    named = [path for path in named if "NAME" not in path and path != "config.yaml"]
    assert len(named) > 5
    assert [path for path in named if not any((root / path).is_file() for root in roots)] == []
