"""Changes of the strategy's arguments in a run that `lightning-3d verify` compares with another
run."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

from lightning_3d.errors import listed
from lightning_3d.layout.layout import Layout
from lightning_3d.options.plain_values import PLAIN_VALUES
from lightning_3d.ranks.role import ALONE, ALONE_WHOLE, Role, hand_over

P = ParamSpec("P")

_TURNED_OFF = {
    **PLAIN_VALUES,
    "fp8": False,
    "compile": False,
    "zero_overlap_gather": False,
    "trace_every_n_steps": None,
}
_KEPT_ALONE = (
    "plan",
    "pipeline_module",
    "self_check",
    "split_batch",
    "seed",
    "sequence_parallel",
    "nonfinite",
    "loss_reduction",
)

notes: list[str] = []
"""What was changed in the script of this process, for the user."""


def suit_role(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate the strategy's `__init__`: change its arguments as the role of this process
    needs."""
    form = signature(init)

    @wraps(init)
    def suited(*args: P.args, **kwargs: P.kwargs) -> None:
        hand_over()
        role = Role.current()
        if role is None or role.is_plain:
            init(*args, **kwargs)
            return
        bound = form.bind(*args, **kwargs)
        bound.arguments = changed_arguments(dict(bound.arguments), role)
        init(*bound.args, **bound.kwargs)

    return suited


def changed_arguments(given: dict[str, Any], role: Role) -> dict[str, Any]:
    """Return the strategy's arguments in a run that is compared, `self` included."""
    off = [name for name, value in _TURNED_OFF.items() if given.get(name, value) != value]
    if off:
        notes.append(
            f"without {listed(off)}, which plain PyTorch does not have or which only changes speed"
        )
    given |= {name: _TURNED_OFF[name] for name in off}
    if role.name not in (ALONE, ALONE_WHOLE):
        return given
    kept = {name: value for name, value in given.items() if name == "self" or name in _KEPT_ALONE}
    rows = role.facts()["micro_batch_rows"] if role.name == ALONE else None
    return kept | {"layout": Layout(), "micro_batch_size": rows}
