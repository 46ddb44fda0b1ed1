"""Write the page of families from the cells that `family_matrix.py` has measured.

python tools/family_page.py CELLS.csv [--more "with padding=PADDING.csv" ...] [--out
docs/families.md]
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from family_configs import has_experts, is_held_out

from lightning_3d.engine.self_check.remembered import versions

ROOT = Path(__file__).resolve().parent.parent
TITLES = {
    "tp2": "tp2",
    "pp2": "pp2",
    "tp2_pp2": "tp2_pp2",
    "zero3": "dp2, ZeRO 3",
    "cp2": "cp2",
    "ep2_dp2": "ep2_dp2",
}
FINE = {"exact", "dense"}
LONGEST = 75  # characters of a reason

INTRO = """# Families of models

Every causal language model of Transformers, trained on six layouts and compared with the same model in a plain PyTorch loop on one
process (a tiny model of each family, 4 steps of AdamW on CPU ranks; {versions}). A model that is not listed, or another version of a
library, is [checked](checks.md) before its first step, so no model trains wrong numbers in silence.

"""  # noqa: E501

COUNTS = """
## Counts

*Exact* allows rounding only: losses and gradient norms differ by at most 1e-5 relative, or by 3 times what another order of the sums
changes on one process. *Refused* ends the run before the first step. *No reference*: the family does not train on one process. {count}
families, chosen by a hash of their names, are held out. Before this split, the refusals of both groups had been read: the two columns
show only that the mechanisms favor neither group. Families without experts do not count for ep2_dp2.

| layout | exact | refused | no reference | exact of those held out | exact of the others |
|---|--:|--:|--:|--:|--:|
"""  # noqa: E501

IMAGES = """
## Models that read images

LLaVA, Gemma 3, Gemma 4 and Qwen2-VL are exact with tp2, pp2 and ZeRO 3 on images, too. With pp, the vision tower is on the first stage;
the first batch must have images, or a later batch with images ends the run. If later blocks need features of the tower (Qwen3-VL), pp is
refused.

The last blocks of Gemma 3n and of small Gemma 4 models use the keys and values of earlier blocks. All blocks that share them must be on
one stage, for example with `parallelism.stages=[18,12]`; otherwise pp is refused.
"""  # noqa: E501

MORE = """
A reference of *bf16* has float32 master weights; its losses may differ by 1e-3, and gradient norms by 1e-2. Outside of this band, with
tp in bf16, are CPM-Ant and Gemma 3n, which magnify rounding, and PLBart, which computes its loss in bf16. All three are exact in float32.

| run | layout | exact | refused | no reference | WRONG, crash or hang |
|---|---|--:|--:|--:|--:|
"""  # noqa: E501


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "families.md")
    parser.add_argument(
        "--more",
        nargs="*",
        default=[],
        metavar="NAME=CELLS.csv",
        help="other runs, whose counts are shown",
    )
    given = parser.parse_args(arguments)
    more = {
        name: read(Path(path)) for name, _, path in (text.partition("=") for text in given.more)
    }
    given.out.write_text(page(read(given.cells), more))
    return 0


def read(path: Path) -> list[dict[str, str]]:
    """The cells in a file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def page(rows: Iterable[Mapping[str, str]], more: Mapping[str, Iterable[Mapping[str, str]]]) -> str:
    """Write the page as Markdown.

    Args:
        rows: the cells.
        more: name of another run -> its cells.
    """
    cells = {(row["family"], row["layout"]): row for row in rows}
    families = sorted({family for family, _ in cells})
    layouts = [layout for layout in TITLES if any((family, layout) in cells for family in families)]
    somewhere = {family for (family, _), row in cells.items() if _kind(row) not in FINE}
    everywhere = [family for family in families if family not in somewhere]
    text = INTRO.format(versions=versions()) + "## Exact on every layout\n\n"
    text += f"With tp, pp, ZeRO 3, cp and ep: {_names(filter(has_experts, everywhere))}.\n\n"
    text += (
        "With tp, pp, ZeRO 3 and cp (they have no experts):"
        f" {_names(family for family in everywhere if not has_experts(family))}.\n\n"
    )
    text += (
        "## Refused on some layouts\n\nEvery other layout is exact. The run prints the whole"
        " reason; here is its beginning.\n"
    )
    rest = sorted(somewhere)
    reasons = {family: _reasons(cells, family, layouts) for family in rest}
    text += "\n" + "".join(
        f"- **{family}** {reason}\n" for family, reason in reasons.items() if reason
    )
    text += IMAGES + COUNTS.format(count=sum(map(is_held_out, families)))
    for layout in layouts:
        found = Counter(
            _kind(cells[family, layout]) for family in families if (family, layout) in cells
        )
        groups = " | ".join(
            _share(cells, filter(group, families), layout)
            for group in (is_held_out, lambda name: not is_held_out(name))
        )
        text += (
            f"| {TITLES[layout]} | {found['exact']} | {found['refused']} | {found['no reference']}"
            f" | {groups} |\n"
        )
    return text + (
        MORE + "".join(_counted(name, list(others)) for name, others in more.items())
        if more
        else ""
    )


def _names(families: Iterable[str]) -> str:
    return ", ".join(f"`{family}`" for family in families)


def _share(
    cells: Mapping[tuple[str, str], Mapping[str, str]], families: Iterable[str], layout: str
) -> str:
    """How many of some families are exact, such as "51 of 53"."""
    found = Counter(
        _kind(cells[family, layout]) for family in families if (family, layout) in cells
    )
    return f"{found['exact']} of {found.total() - found['no reference'] - found['dense']}"


def _counted(name: str, rows: list[Mapping[str, str]]) -> str:
    """Lines with the counts of another run."""
    text = ""
    for layout in dict.fromkeys(row["layout"] for row in rows):
        found = Counter(_kind(row) for row in rows if row["layout"] == layout)
        bad = sum(found[kind] for kind in ("WRONG", "crash", "hang"))
        numbers = f"{found['exact']} | {found['refused']} | {found['no reference']} | {bad}"
        text += f"| {name} | {TITLES.get(layout, layout)} | {numbers} |\n"
    return text


def _kind(row: Mapping[str, str]) -> str:
    is_dense = (
        row["verdict"] == "refused"
        and row["layout"].startswith("ep")
        and not has_experts(row["family"])
    )
    return "dense" if is_dense else row["verdict"]


def _reasons(
    cells: Mapping[tuple[str, str], Mapping[str, str]], family: str, layouts: Iterable[str]
) -> str:
    """The reasons of what is not exact in one family, each once with its layouts."""
    found: dict[str, list[str]] = {}
    for layout in layouts:
        row = cells.get((family, layout))
        if row is not None and _kind(row) not in FINE:
            verdict = "" if row["verdict"] == "refused" else f"{row['verdict']}: "
            found.setdefault(verdict + _short(row["detail"]), []).append(layout)
    return "; ".join(f"{_where(names, layouts)}{reason}" for reason, names in found.items())


def _where(names: list[str], layouts: Iterable[str]) -> str:
    """The layouts of a reason, before it."""
    return "all: " if names == list(layouts) else f"{', '.join(names)}: "


def _short(text: str) -> str:
    flat = " ".join(
        text.partition(": ")[2].split() if text.split(":")[0].endswith("Error") else text.split()
    )
    flat = re.sub(r"Self-check: \w+ as rewritten for \w+ fails", "Self-check fails", flat)
    flat = flat.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")
    return flat if len(flat) <= LONGEST else f"{flat[: LONGEST - 1].rsplit(' ', 1)[0]} …"


if __name__ == "__main__":
    sys.exit(main())
