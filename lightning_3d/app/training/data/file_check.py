"""Check of the files of a `data/` config before ranks are started. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_3d.app.training.data.blend_sources import check_blend
from lightning_3d.app.training.data.corpus import find_corpora, require_separator
from lightning_3d.app.training.data.remote_corpora import Finder


def check_files(config: Mapping[str, Any], steps: int | None = None) -> None:
    """Check the files of a `data/` config before ranks are started. Does nothing for data other
    than `data=tokens` and `data=blend`.

    Args:
        config: the group `data`.
        steps: length of the run; None: not known.

    Raises:
        ConfigError: an option of a source does not fit. DataError: see `find_corpora` and
            `check_blend`.
    """
    if config.get("name") == "tokens" and config.get("train_path"):
        known = {
            key: config.get(key)
            for key in ("val_path", "tokenizer", "document_separator", "check_hashes")
        }
        require_separator(
            find_corpora(config["train_path"], **known, find=Finder(config, fresh=True))[0], config
        )
    if config.get("name") == "blend" and config.get("sources"):
        check_blend(config, steps)
