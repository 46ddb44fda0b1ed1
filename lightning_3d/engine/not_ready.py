"""Error for reading an attribute of the strategy before the Trainer has set it."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")

BUILT = (
    "the model of this rank is built when trainer.fit, validate, test or predict begins (in setup)"
)
CONNECTED = (
    "ranks are connected when trainer.fit, validate, test or predict begins (in setup_environment)"
)
ATTACHED = "pass the strategy to a Trainer, and call trainer.fit, validate, test or predict"


def require(value: T | None, what: str, when: str) -> T:
    """Return `value`, which is None until a Trainer has set it.

    Args:
        what: name of the value, with its article.
        when: when it is set.

    Raises:
        RuntimeError: the value is still None.
    """
    if value is None:
        raise RuntimeError(f"Lightning3DStrategy does not have {what} yet: {when}.")
    return value
