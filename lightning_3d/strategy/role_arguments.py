"""Changes of the strategy's options in a run that `lightning-3d verify` compares with another
run."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from lightning_3d.errors import listed
from lightning_3d.layout.layout import Layout
from lightning_3d.options.options import Options
from lightning_3d.options.schema import RESULT, SPEED, defaults_of
from lightning_3d.ranks.role import ALONE, ALONE_WHOLE, Role, hand_over

Given = TypeVar("Given", bound=Options)

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


def suit_role(options: Given) -> Given:
    """Return the options as the role of this process needs them."""
    hand_over()
    role = Role.current()
    return options if role is None or role.is_plain else changed_options(options, role)


def changed_options(given: Given, role: Role) -> Given:
    """Return the options in a run that is compared."""
    plain = defaults_of(Options, beyond_torch=[RESULT, SPEED])
    off = [name for name, value in plain.items() if getattr(given, name) != value]
    if off:
        notes.append(
            f"without {listed(off)}, which plain PyTorch does not have or which only changes speed"
        )
    if role.name not in (ALONE, ALONE_WHOLE):
        return replace(given, **{name: plain[name] for name in off})
    rows = role.facts()["micro_batch_rows"] if role.name == ALONE else None
    kept = {name: getattr(given, name) for name in _KEPT_ALONE}
    return type(given)(layout=Layout(), micro_batch_size=rows, **kept)
