"""Write the page of families from the cells that `family_matrix.py` has measured.

    python tools/family_page.py CELLS.csv [--more "with padding=PADDING.csv" ...] [--out docs/families.md]
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from family_configs import has_experts, is_held_out

from lightning_3d.strategy.self_check.remembered import versions

ROOT = Path(__file__).resolve().parent.parent
TITLES = {"tp2": "tp2", "pp2": "pp2", "tp2_pp2": "tp2_pp2", "zero3": "dp2, ZeRO 3", "cp2": "cp2", "ep2_dp2": "ep2_dp2"}
LONGEST = 300  # characters of a reason

INTRO = """# Families of models

What each causal language model of Transformers computes on six layouts, compared with the same model in a plain PyTorch loop on one
process. `python tools/family_matrix.py` makes the numbers ({versions}): a tiny model of each family trains 4 steps of AdamW on CPU ranks.

- A **number** is the largest relative difference of a loss or a gradient norm in 4 steps. It is rounding: at most 1e-5, or 3 times what
  another order of the sums changes on one process.
- **refused**: the strategy ends the run before the first step. [The reasons](#refusals) are below.
- **no reference**: the family does not train on one process.
- **dense**: the family has no experts, which ep needs.

No family trains wrong numbers in silence: a model that is not in this list, or another version of a library, is
[checked](verify.md) before its first step.

| layout | exact | refused | no reference | exact of those held out | exact of the others |
| --- | --: | --: | --: | --: | --: |
"""

HELD_OUT = """
Families without experts do not count in the row of ep2_dp2.

**Held out** are {count} families, chosen by a hash of their names. Only families with a reference count here and, for ep2_dp2, only those
with experts. The split is newer than the first derived plans and repairs: until then, all families had been run, and the refusals of both
groups had been read. Llama, for example, is held out only from now on. So the two columns show that the mechanisms favor neither group.
They do not show what happens to models that nobody has seen. The [self-check](verify.md) is for those.
"""

IMAGES = """
## Models that read images

The families above were trained on text. LLaVA, Gemma 3, Gemma 4 and Qwen2-VL were also trained with images
(`tests/strategy/test_images.py`). They are exact with tp2, pp2 and ZeRO 3. With pp, the vision tower is on the first stage, and other
stages do not get the images. If later blocks need features of the tower (Qwen3-VL), the self-check refuses pp. The first batch must have
images, or a later batch with images ends the run.

The last blocks of Gemma 3n and of small Gemma 4 models use the keys and values of earlier blocks. These do not travel between stages: all
blocks that share them must be on one stage, for example with `parallelism.stages=[18,12]`; otherwise the self-check refuses pp. The tiny
models above do not share them.
"""

MORE = """
## Other data, numbers and versions

The variants of `family_matrix.py`, and versions of Transformers. A reference of *bf16* has float32 master weights; its losses may differ by
1e-3, and gradient norms by 1e-2. Three families are outside of this band with tp in bf16, and exact in float32: CPM-Ant and Gemma 3n
magnify rounding (a gradient norm of CPM-Ant changes by 11 % if one process adds up in another order), and PLBart computes its loss in bf16,
whose last bit is 0.4 %. *dropout*: 0.1 in the configuration, and the model in evaluation mode.

| run | layout | exact | refused | no reference | WRONG, crash or hang |
| --- | --- | --: | --: | --: | --: |
"""


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "families.md")
    parser.add_argument("--more", nargs="*", default=[], metavar="NAME=CELLS.csv", help="other runs, whose counts are shown")
    given = parser.parse_args(arguments)
    more = {name: read(Path(path)) for name, _, path in (text.partition("=") for text in given.more)}
    given.out.write_text(page(read(given.cells), more))
    return 0


def read(path: Path) -> list[dict[str, str]]:
    """The cells in a file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def page(rows: Iterable[Mapping[str, str]], more: Mapping[str, Iterable[Mapping[str, str]]]) -> str:
    """The page as Markdown.

    Args:
        rows: the cells.
        more: name of another run -> its cells.
    """
    cells = {(row["family"], row["layout"]): row for row in rows}
    families = sorted({family for family, _ in cells})
    layouts = [layout for layout in TITLES if any((family, layout) in cells for family in families)]
    text = INTRO.format(versions=versions())
    for layout in layouts:
        found = Counter(_kind(cells[family, layout]) for family in families if (family, layout) in cells)
        groups = " | ".join(_share(cells, filter(group, families), layout) for group in (is_held_out, lambda name: not is_held_out(name)))
        text += f"| {TITLES[layout]} | {found['exact']} | {found['refused']} | {found['no reference']} | {groups} |\n"
    text += HELD_OUT.format(count=sum(map(is_held_out, families)))
    text += (MORE + "".join(_counted(name, list(others)) for name, others in more.items()) if more else "") + "\n## Each family\n\n"
    text += f"| family | {' | '.join(TITLES[layout] for layout in layouts)} |\n| --- |{' --- |' * len(layouts)}\n"
    for family in families:
        shown = [_shown(cells.get((family, layout))) for layout in layouts]
        text += f"| {family} | {' | '.join(shown)} |\n"
    reasons = {family: _reasons(cells, family, layouts) for family in families}
    return text + IMAGES + "\n## Refusals\n\n" + "".join(f"- **{family}** {reason}\n" for family, reason in reasons.items() if reason)


def _share(cells: Mapping[tuple[str, str], Mapping[str, str]], families: Iterable[str], layout: str) -> str:
    """How many of some families are exact, such as "51 of 53"."""
    found = Counter(_kind(cells[family, layout]) for family in families if (family, layout) in cells)
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
    is_dense = row["verdict"] == "refused" and row["layout"].startswith("ep") and not has_experts(row["family"])
    return "dense" if is_dense else row["verdict"]


def _shown(row: Mapping[str, str] | None) -> str:
    if row is None:
        return ""
    if row["verdict"] != "exact":
        return _kind(row)
    return f"{max(float(row['loss']), float(row['norm'])):.0e}"


def _reasons(cells: Mapping[tuple[str, str], Mapping[str, str]], family: str, layouts: Iterable[str]) -> str:
    """The reasons of one family's refusals, each once with its layouts."""
    found: dict[str, list[str]] = {}
    for layout in layouts:
        row = cells.get((family, layout))
        if row is not None and _kind(row) in ("refused", "no reference"):
            found.setdefault(_short(row["detail"]), []).append(layout)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in found.items())


def _short(text: str) -> str:
    flat = " ".join(text.partition(": ")[2].split() if text.split(":")[0].endswith("Error") else text.split())
    flat = flat.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")
    return flat if len(flat) <= LONGEST else f"{flat[: LONGEST - 1].rsplit(' ', 1)[0]} …"


if __name__ == "__main__":
    sys.exit(main())
