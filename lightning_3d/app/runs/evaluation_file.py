"""`evaluation.json` in a run folder: losses of the last validation, and a sample of text. Imports
nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EVALUATION_FILE = "evaluation.json"


def read_evaluation(folder: Path) -> dict[str, Any]:
    """Read the evaluation of a run; empty if it has none, or if the file is damaged.

    Returns:
        `step`; `sets`, name -> `loss`, `perplexity`, `tokens` and `samples`; and `sample`, which is
        None or has `prompt`, `text`, `temperature` and `seed`.
    """
    try:
        found = json.loads((folder / EVALUATION_FILE).read_text("utf-8"))
        return {
            "step": int(found["step"]),
            "sets": {str(name): _numbers(entry) for name, entry in found["sets"].items()},
            "sample": found["sample"] and _sample(found["sample"]),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def printable(text: str, encoding: str = "utf-8") -> str:
    """Replace what a terminal would obey or cannot show: control characters, except ends of lines
    and tabs, and what an encoding lacks.

    A model may write any character.
    """
    kept = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text
    )
    return kept.encode(encoding, "replace").decode(encoding)


def _numbers(entry: dict[str, Any]) -> dict[str, Any]:
    """Read the numbers of a set; null stands for one that is not finite."""
    loss, perplexity = (
        float("nan") if entry[key] is None else float(entry[key]) for key in ("loss", "perplexity")
    )
    return {
        "loss": loss,
        "perplexity": perplexity,
        "tokens": int(entry["tokens"]),
        "samples": int(entry["samples"]),
    }


def _sample(entry: dict[str, Any]) -> dict[str, Any]:
    words = {key: printable(str(entry[key])) for key in ("prompt", "text")}
    return {**words, "temperature": float(entry["temperature"]), "seed": int(entry["seed"])}
