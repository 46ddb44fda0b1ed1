"""Renders the project template: with copier if it is installed, else as copier would, with Jinja
alone."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import yaml
from command_line import REPOSITORY
from jinja2 import Environment, StrictUndefined

TEMPLATE = REPOSITORY / "template"
SETTINGS: dict[str, Any] = yaml.safe_load((TEMPLATE / "copier.yml").read_text())
QUESTIONS = {name: question for name, question in SETTINGS.items() if not name.startswith("_")}


def environment() -> Environment:
    jinja = Environment(keep_trailing_newline=True, undefined=StrictUndefined)
    # copier has the filters of Ansible
    jinja.filters["regex_search"] = lambda text, pattern: re.search(pattern, text)
    return jinja


def answers(**given: str) -> dict[str, str]:
    """Answers to all questions: those given, and defaults, which may refer to answers before
    them."""
    found: dict[str, str] = {}
    for name, question in QUESTIONS.items():
        found[name] = given.get(name) or environment().from_string(question["default"]).render(
            found
        )
        if wrong := environment().from_string(question.get("validator", "")).render(found):
            raise ValueError(wrong)
    return found


def render(folder: Path, **given: str) -> Path:
    """Render the template into a new folder."""
    if importlib.util.find_spec("copier") is not None:
        import copier

        copier.run_copy(str(TEMPLATE), folder, data=given, defaults=True, quiet=True)
    else:
        render_with_jinja(folder, **given)
    return folder


def render_with_jinja(folder: Path, **given: str) -> None:
    jinja, known, source = environment(), answers(**given), TEMPLATE / SETTINGS["_subdirectory"]
    suffix = SETTINGS["_templates_suffix"]
    for file in sorted(
        path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ):
        parts = [
            jinja.from_string(part.removesuffix(suffix)).render(known)
            for part in file.relative_to(source).parts
        ]
        if not all(parts):
            continue  # a name that is rendered to nothing leaves the file out
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text("utf-8")
        target.write_text(
            jinja.from_string(text).render(known) if file.name.endswith(suffix) else text,
            encoding="utf-8",
        )
