"""Every family of causal language models in Transformers on every layout, against a plain PyTorch
loop on one process.

    python tools/family_matrix.py --layouts tp2 pp2 tp2_pp2 zero3 ep2_dp2 cp2 [--families a b] [--shard 1/4] [--held-out without]
        [--variant padding] [--out FILE.csv] [--resume] [--self-check never] [--verified]

A tiny model of each family trains 4 steps of AdamW on CPU ranks, in an ordinary LightningModule
with `Lightning3DStrategy`. Losses, gradient norms and final weights are compared with those of the
same model in a loop of Transformers and PyTorch alone. A difference that may be rounding is
measured again in float64; with ZeRO, which has none, with a larger epsilon of Adam. A cell is

    exact          equal within the tolerances of tests/support/parity.py, or 3 x what another order of the sums changes on one process
    refused        the strategy raised one of its own errors on every rank
    WRONG          something else was computed
    crash, hang    any other error; no end within --timeout seconds
    no reference   the family does not train on one process

A third of the families, chosen by hash, is held out: use --held-out without while you build, and
--held-out only at the end. Counts are printed for both groups.

For another version of Transformers, put it in front of the installed one:

    pip install --target OLD --no-deps transformers==5.2.0 "huggingface-hub<2" "tokenizers<0.23.1"
    PYTHONPATH=OLD python tools/family_matrix.py --families llama mixtral gemma2

With --verified, the families and axes that are exact are added to the list that ships with the
package: with these versions of torch and Transformers their models need no self-check.

Prints a line for each cell and a table of counts. Exit code 1 when something is wrong, crashes or
hangs.
"""  # noqa: E501

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from family_configs import NO_REFERENCE as WITHOUT
from family_configs import build, families, is_held_out
from family_training import (
    BF16,
    CRASH,
    EXACT,
    HANG,
    LARGE_EPSILON,
    NO_REFERENCE,
    REFUSED,
    SAID,
    VARIANTS,
    WRONG,
    Recipe,
    Reference,
    Verdict,
    judge,
    on_layout,
    parse,
    reference,
    train_on_rank,
)
from ranks import RankPool, RankTimeout

from lightning_3d.engine.self_check.remembered import VERIFIED, family_of, versions
from lightning_3d.options.own_model import MODES

LAYOUTS = ("tp2", "pp2", "tp2_pp2", "zero3", "ep2_dp2", "cp2")
KINDS = (EXACT, REFUSED, WRONG, CRASH, HANG, NO_REFERENCE)
BAD = {WRONG, CRASH, HANG}
FIELDS = (
    "family",
    "layout",
    "verdict",
    "loss",
    "norm",
    "weight",
    "noise_loss",
    "noise_norm",
    "noise_weight",
    "seconds",
    "detail",
)
OTHERS_SECONDS = 20.0  # a rank that refuses says so after those that it ends, on a busy machine
CELLS_OF_A_POOL = 150  # then ranks are started anew, so that what libraries keep does not add up


@dataclass(frozen=True)
class Cell:
    """A row of the table."""

    family: str
    layout: str
    verdict: Verdict
    seconds: float

    def row(self) -> dict[str, str]:
        numbers = [
            getattr(source, name) if source else None
            for source in self._sources
            for name in ("loss", "norm", "weight")
        ]
        texts = ["" if number is None else f"{number:.1e}" for number in numbers]
        return dict(
            zip(
                FIELDS,
                (
                    self.family,
                    self.layout,
                    self.verdict.kind,
                    *texts,
                    f"{self.seconds:.1f}",
                    self.verdict.detail,
                ),
                strict=True,
            )
        )

    @property
    def _sources(self) -> tuple:
        return self.verdict.error, self.verdict.noise

    def line(self) -> str:
        error = self.verdict.error
        numbers = (
            f"loss {error.loss:.1e} norm {error.norm:.1e} weight {error.weight:.1e} "
            if error
            else ""
        )
        return (
            f"{self.family:<24} {self.layout:<8} {self.verdict.kind:<12} {self.seconds:5.1f} s "
            f" {numbers}{short(self.verdict.detail)}"
        )


def short(text: str, length: int = 200) -> str:
    """The beginning of a text, on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= length else f"{flat[: length - 1]}…"


class Matrix:
    """Runs cells on one pool of ranks, and each family's reference once."""

    def __init__(
        self,
        timeout: float,
        pool: RankPool | None = None,
        self_check: str = "auto",
        variant: str = "",
    ) -> None:
        self._timeout, self._self_check, self._variant = timeout, self_check, variant
        self._pool = pool or RankPool(limit=4, others_seconds=OTHERS_SECONDS)
        self._references: dict[Recipe, Reference | str] = {}
        self._cells = 0

    def run(self, family: str, layout: str) -> Cell:
        """One cell, with a second opinion on differences that may be rounding."""
        started = time.monotonic()
        dtype = "bfloat16" if self._variant == BF16 else "float32"
        verdict = self._measure(Recipe(family, dtype, variant=self._variant), layout)
        if (
            verdict.error is not None
            and dtype == "float32"
            and (verdict.kind == WRONG or not verdict.is_plain)
        ):
            verdict = self._again(family, layout, verdict)
        self._cells += 1
        if self._cells % CELLS_OF_A_POOL == 0:
            self.close()
        return Cell(family, layout, verdict, time.monotonic() - started)

    def forget(self) -> None:
        """Drop the references of a family that is done."""
        self._references.clear()

    def close(self) -> None:
        """End the ranks."""
        self._pool.close()

    def _again(self, family: str, layout: str, first: Verdict) -> Verdict:
        zero = parse(layout)[1] > 0
        recipe = (
            Recipe(family, epsilon=LARGE_EPSILON, variant=self._variant)
            if zero
            else Recipe(family, "float64", variant=self._variant)
        )
        second = self._measure(recipe, layout)
        how = f"with Adam's epsilon {LARGE_EPSILON:g}" if zero else "in float64"
        if second.kind == EXACT and second.error is not None and first.error is not None:
            numbers = (
                f"loss {first.error.loss:.1e}, norm {first.error.norm:.1e}, weight"
                f" {first.error.weight:.1e} of {first.error.name}"
            )
            return Verdict(
                EXACT, f"{how}; in float32, by rounding: {numbers}", second.error, second.noise
            )
        if second.error is None:
            return Verdict(
                WRONG,
                f"{first.detail}; {how}: {second.kind} {second.detail}",
                first.error,
                first.noise,
            )
        return Verdict(WRONG, f"{how}: {second.detail}", second.error, second.noise)

    def _measure(self, recipe: Recipe, layout: str) -> Verdict:
        expected = self._reference(on_layout(recipe, layout))
        if isinstance(expected, str):
            return Verdict(NO_REFERENCE, expected)
        try:
            parts = self._pool.run(
                train_on_rank,
                parse(layout)[0].world_size,
                (recipe, layout, self._self_check),
                {},
                self._timeout,
                True,
            )
        except RankTimeout as error:
            return Verdict(HANG, "\n".join([str(error), *getattr(error, "__notes__", [])]))
        except Exception as error:
            text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
            said = re.findall(rf"^{SAID}(.*)$", text, re.MULTILINE) + [
                one for one in getattr(error, "answers", ()) if isinstance(one, str)
            ]
            # A rank that refuses ends the others, which wait for it, with exit code 2.
            return (
                Verdict(REFUSED, said[0])
                if said and "ended with exit code 2 and no answer" in text
                else Verdict(CRASH, text)
            )
        refused = [part for part in parts if isinstance(part, str)]
        if refused:
            return Verdict(REFUSED if len(refused) == len(parts) else CRASH, refused[0])
        return judge(parts, expected, recipe.dtype)

    def _reference(self, recipe: Recipe) -> Reference | str:
        if recipe.family in WITHOUT:
            return WITHOUT[recipe.family]
        if recipe not in self._references:
            try:
                self._references[recipe] = self._pool.run(
                    reference, 1, (recipe,), {}, self._timeout, True
                )[0]
            except Exception as error:
                self._references[recipe] = f"{type(error).__name__}: {error}"
        return self._references[recipe]


def sweep(
    chosen: Iterable[str],
    layouts: Iterable[str],
    timeout: float,
    done: set[tuple[str, str]],
    self_check: str = "auto",
    variant: str = "",
) -> Iterator[Cell]:
    """The cells that are not done yet, family by family."""
    matrix = Matrix(timeout, self_check=self_check, variant=variant)
    try:
        for family in chosen:
            for layout in layouts:
                if (family, layout) not in done:
                    yield matrix.run(family, layout)
            matrix.forget()
    finally:
        matrix.close()


def counts(verdicts: Iterable[tuple[str, str, str]]) -> str:
    """A table of (family, layout, verdict), for all families and for those that are held out."""
    found = Counter((layout, kind, is_held_out(family)) for family, layout, kind in verdicts)
    lines = [f"{'layout':<20}" + "".join(f"{kind:>14}" for kind in KINDS)]
    for layout in dict.fromkeys(layout for layout, _, _ in found):
        for name, groups in ((layout, (True, False)), ("  held out", (True,))):
            lines.append(
                f"{name:<20}"
                + "".join(
                    f"{sum(found[layout, kind, group] for group in groups):>14}" for kind in KINDS
                )
            )
    return "\n".join(lines)


def rows_of(path: Path | None) -> list[dict[str, str]]:
    """What an earlier sweep has written."""
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@contextmanager
def open_csv(path: Path | None, rows: list[dict[str, str]]) -> Iterator[Callable[[Cell], None]]:
    """Writes cells to a file as they come, behind the rows of an earlier sweep; to nowhere without
    a path."""
    if path is None:
        yield lambda cell: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
        file.flush()

        def write(cell: Cell) -> None:
            writer.writerow(cell.row())
            file.flush()

        yield write


AXES = {"tp2": "tp", "pp2": "pp", "ep2_dp2": "ep", "cp2": "cp"}


def add_verified(cells: Iterable[tuple[str, str, str]]) -> int:
    """Add what is exact of (family, layout, verdict) to the list of `self_check.remembered`.
    Returns the number of families."""
    listed = json.loads(VERIFIED.read_text())
    axes: dict[str, set[str]] = {}
    for family, layout, verdict in cells:
        if verdict == EXACT and layout in AXES:
            axes.setdefault(family, set()).add(AXES[layout])
    known = listed.setdefault(versions(), {})
    for family in axes:
        with torch.device("meta"):
            known[family_of(build(family))] = sorted(axes[family])
    VERIFIED.write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n")
    return len(axes)


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--families", nargs="+", default=None)
    parser.add_argument(
        "--shard", default="1/1", help="which part of the families, for example 1/4"
    )
    parser.add_argument(
        "--held-out",
        choices=("only", "without"),
        default=None,
        help="of the families, only those held out, or all others",
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="a CSV file with a row for each cell"
    )
    parser.add_argument(
        "--resume", action="store_true", help="skip the cells that --out has already"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a cell")
    parser.add_argument(
        "--self-check",
        default="auto",
        choices=MODES,
        help="of the strategy; never: the rewrites alone are judged",
    )
    parser.add_argument(
        "--variant", default="", choices=VARIANTS, help="see Recipe of family_training.py"
    )
    parser.add_argument(
        "--verified",
        action="store_true",
        help="add what is exact to the package's list of verified families",
    )
    given = parser.parse_args(arguments)
    known = families()
    if unknown := sorted(set(given.families or ()) - set(known)):
        parser.error(f"not a family of Transformers' causal language models: {', '.join(unknown)}")
    index, parts = (int(part) for part in given.shard.split("/"))
    chosen = [family for family in known if given.families is None or family in given.families]
    if given.held_out is not None:
        chosen = [family for family in chosen if is_held_out(family) == (given.held_out == "only")]
    chosen = chosen[index - 1 :: parts]
    rows = rows_of(given.out) if given.resume else []
    seen = [(row["family"], row["layout"], row["verdict"]) for row in rows]
    with open_csv(given.out, rows) as write:
        done = {(row["family"], row["layout"]) for row in rows}
        for cell in sweep(
            chosen, given.layouts, given.timeout, done, given.self_check, given.variant
        ):
            print(cell.line(), flush=True)
            write(cell)
            seen.append((cell.family, cell.layout, cell.verdict.kind))
    print(counts(seen))
    if given.verified:
        print(f"{add_verified(seen)} families in {VERIFIED.name}")
    return int(any(verdict in BAD for _, _, verdict in seen))


if __name__ == "__main__":
    sys.exit(main())
