"""Prepared tokens: memory-mapped `.bin` files with their JSON (see `token_file`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.training.data.base import PackedDataModule
from lightning_3d.training.data.packing import Tokens
from lightning_3d.training.data.token_file import open_tokens


class TokenFiles(PackedDataModule):
    """Samples from a token file. The operating system keeps one copy in memory for all ranks of a node.

    Args:
        train_path: `.bin` to train on.
        val_path: held-out `.bin`; None holds out the end of `train_path`.
        val_fraction: fraction of `train_path` that is held out if there is no `val_path`; 0 for no validation.
        **kwargs: see `PackedDataModule`.
    """

    def __init__(
        self,
        *,
        train_path: str | os.PathLike[str],
        val_path: str | os.PathLike[str] | None = None,
        val_fraction: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= val_fraction < 1:
            raise ConfigError(f"data.val_fraction must be at least 0 and less than 1; got {val_fraction}.")
        self.train_path = Path(train_path)
        self.val_path = Path(val_path) if val_path is not None else None
        self.val_fraction = val_fraction

    @override
    def load_tokens(self) -> tuple[Tokens, Tokens | None]:
        train = map_tokens(self.train_path)
        if self.val_path is not None:
            return train, map_tokens(self.val_path)
        return train.hold_out(self.val_fraction, self.sequence_length)


def map_tokens(path: Path) -> Tokens:
    """Map a token file into memory.

    Raises:
        DataError: see `open_tokens`.
    """
    values, index = open_tokens(path)
    return Tokens(values, str(path), index.document_separator)
