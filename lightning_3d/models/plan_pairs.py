"""Pairs of a plan: what a column-parallel layer splits, a row-parallel layer of the same block must
join again. Reads names only."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lightning_3d.errors import PlanError, listed

OPEN_COLUMNS = frozenset({"colwise", "packed_colwise"})
"""Styles whose output each rank has only in part."""
OPEN_ROWS = frozenset({"rowwise", "packed_rowwise"})
"""Styles whose input each rank has only in part."""


def require_pairs(styles: dict[str, str], blocks: Iterable[str]) -> None:
    """Refuse a plan in which a block splits features that it does not join, or joins what it does
    not split.

    Layers are a pair if the smallest module around one of them that has the other kind, too, is
    inside the block: query and output projection of one attention, or of two modules in it.

    Args:
        styles: name of a layer -> its style.
        blocks: names of the blocks.

    Raises:
        PlanError: with the layers that have no partner.
    """
    for block in blocks:
        inside = {
            name: style
            for name, style in styles.items()
            if name.startswith(f"{block}.") and style in OPEN_COLUMNS | OPEN_ROWS
        }
        if alone := _without_partner(inside, block):
            style = inside[alone[0]]
            other, gathering = (
                ("rowwise", "colwise_gather_output")
                if style in OPEN_COLUMNS
                else ("colwise", "rowwise_split_input")
            )
            raise PlanError(
                f"The plan shards {listed(map(_pattern, alone))} with the style '{style}', but no"
                f" '{other}' layer of the same block goes with"
                f" {'them' if len(alone) > 1 else 'it'}. A 'colwise' layer splits features, and a"
                f" 'rowwise' layer must join them. Add the '{other}' layer to the plan, or use the"
                f" style '{gathering}', which needs no partner."
            )


def _without_partner(styles: dict[str, str], block: str) -> list[str]:
    """Return the layers of one block that have no partner: from the innermost modules outwards,
    both kinds together close a pair."""
    open_layers: dict[str, list[str]] = {}
    for name in styles:
        open_layers.setdefault(name.rpartition(".")[0], []).append(name)
    while deeper := [module for module in open_layers if module != block]:
        module = max(deeper, key=lambda name: name.count("."))
        names = open_layers.pop(module)
        if not _is_closed(names, styles):
            open_layers.setdefault(module.rpartition(".")[0], []).extend(names)
    left = open_layers.get(block, [])
    return [] if _is_closed(left, styles) else left


def _is_closed(names: list[str], styles: dict[str, str]) -> bool:
    return len({styles[name] in OPEN_COLUMNS for name in names}) != 1


def _pattern(name: str) -> str:
    return repr(re.sub(r"\.\d+(?=\.)", ".*", name))
