"""Which cases of a list run always, and which in the long sweeps only."""

from collections.abc import Sequence
from typing import Any

import pytest

_Marked = type(pytest.param())


def by_default(cases: Sequence[Any], *places: int) -> list[Any]:
    """``pytest`` runs the cases at these places, ``pytest -m full`` the others; those with marks
    keep theirs."""
    return [
        (
            case
            if place in places or isinstance(case, _Marked)
            else pytest.param(
                *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full
            )
        )
        for place, case in enumerate(cases)
    ]
