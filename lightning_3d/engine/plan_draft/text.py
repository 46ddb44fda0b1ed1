"""A draft as Python code to paste."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_3d.engine.plan_draft.draft import Draft
from lightning_3d.models.parallel_plan import Cut


def as_python(draft: Draft) -> str:
    """Write a draft as an assignment to `plan`, with what is missing from it as comments."""
    lines = (
        ["from lightning_3d import Cut", ""]
        if any(isinstance(cut, Cut) for cut in draft.plan.get("tp", {}).values())
        else []
    )
    lines += [
        f"# {axis}: {problem}." for axis, problems in draft.problems.items() for problem in problems
    ]
    lines += [f"# {note}." for note in draft.notes]
    lines += [
        "plan = {",
        *(f"    {line}" for part, entries in draft.plan.items() for line in _part(part, entries)),
        "}",
    ]
    return "\n".join(lines)


def _part(name: str, entries: dict[str, Any]) -> Iterator[str]:
    yield f'"{name}": {{'
    for key, value in entries.items():
        yield f'    "{key}": {_value(value)},'
    yield "},"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Cut):
        given = {"units": value.units, "parts": value.parts, "shared": value.shared}
        return f"Cut({', '.join([_value(value.style), *(f'{key}={item}' for key, item in given.items() if item)])})"  # noqa: E501
    inputs, outputs = value
    return f"({_names(inputs)}, {_names(outputs)})"


def _names(names: list[str]) -> str:
    return f"[{', '.join(_value(name) for name in names)}]"
