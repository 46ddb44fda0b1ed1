"""Imports of libraries without the warnings that they print."""

from __future__ import annotations

import logging


def quiet_imports() -> None:
    """Transformers imports torchao where it is installed, which warns of extensions that do not load (0.18), itself and through torch."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
