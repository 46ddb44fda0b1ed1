"""Write one self-contained HTML file from a template, a style and scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_3d.storage.json_file import replace_text

ASSETS = Path(__file__).parent / "assets"


def write_page(
    path: Path, template: str, scripts: Sequence[str], data: Mapping[str, Any], **values: Any
) -> Path:
    """Write the file atomically.

    Args:
        path: the file.
        template: name of the template in `assets`.
        scripts: names of the scripts in `assets`, run one after the other.
        data: numbers that the scripts draw, `data` in them; numbers that are not finite become
            null.
        values: values for the template.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from lightning_3d.version import __version__

    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {}  # keys in their order
    text = environment.get_template(template).render(
        style=Markup((ASSETS / "style.css").read_text("utf-8")),
        script=Markup(
            "\n".join(
                (ASSETS / name).read_text("utf-8").replace('"use strict";\n', "")
                for name in scripts
            )
        ),
        data=without_nan(data),
        version=__version__,
        **values,
    )
    replace_text(path, text)
    return path


def without_nan(value: Any) -> Any:
    """Replace numbers that JSON cannot express by None."""
    if isinstance(value, Mapping):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Numbers as people read them; `charts.js` has the same functions.


def show_seconds(value: float) -> str:
    if value >= 120:
        minutes, rest = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def show_percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def show_count(value: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}"
