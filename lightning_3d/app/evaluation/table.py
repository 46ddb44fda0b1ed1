"""What an evaluation prints, and the file that it writes. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_3d.storage.json_file import replace_text


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, numbers to the right. The first row has the titles."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        words = [first[0].ljust(first[1]), *(word.rjust(width) for word, width in others)]
        lines.append("  ".join(words).rstrip())
    return "\n".join(lines)


def losses_table(sets: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the losses of validation sets, see `losses_content`."""
    titles = ("set", "loss (nats/token)", "perplexity", "tokens", "samples")
    rows = [
        (
            name,
            f"{entry['loss']:.6f}",
            f"{entry['perplexity']:.6g}",
            f"{entry['tokens']:,}",
            f"{entry['samples']:,}",
        )
        for name, entry in sets.items()
    ]
    return format_table([titles, *rows])


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write results as JSON; numbers that are not finite become null, because JSON does not have
    them."""
    replace_text(path, json.dumps(_finite(content), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
