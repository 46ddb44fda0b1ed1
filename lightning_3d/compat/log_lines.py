"""Log lines of other libraries that every rank prints, although nobody can act on them. Imports
only the standard library."""

from __future__ import annotations

import logging
import re

_DROPPED = {
    # torchao 0.18: its compiled extensions do not load. Transformers imports torchao wherever it is
    # installed; nothing here needs them.
    "torchao": r"Failed to load |Skipping import of cpp extensions",
    # torchao 0.18, where Triton is not installed: its int8 kernels, which nothing here needs. Its
    # logger has a NullHandler, so the line appears only where logging is configured, as Hydra does.
    "torchao.kernel.intmm": r"Warning: Detected no triton",
    # torch 2.13: how torchao registers its enumerations is deprecated.
    "torch.utils._pytree": r".*is an Enum subclass and is now natively supported",
    # Lightning 2.6: `seed_everything` on all ranks. Rank 0 keeps its line, which has no prefix in a
    # script that Lightning starts.
    "lightning.fabric.utilities.seed": r"\[rank: [1-9]",
}
"""By logger: the beginnings of lines to drop, as regular expressions."""


class _Drop(logging.Filter):
    """Drops records whose message matches a pattern."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = re.compile(pattern)

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.pattern.match(record.getMessage())


def drop_lines() -> None:
    """Drop these lines in this process. Other lines of the same loggers are still printed. May be
    called twice."""
    for name, pattern in _DROPPED.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Drop) for known in logger.filters):
            logger.addFilter(_Drop(pattern))
