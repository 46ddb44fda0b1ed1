"""`python -m benchmarks.planner_accuracy FILE.csv [--failed FILE.csv] [--plain] [--folds N] [--out
FILE.md]`, in a checkout: compare the planner with measured runs.

`--plain` prints only the tables of all runs, next to two baselines; `--failed` adds the calibration
of the memory. Without `--plain`, it prints the errors of step time and memory by source and type of
GPU, and how good the layout is that the planner would have chosen. With `--folds N` it also fits
the constants again for each of N parts of the cells (a model on a number of GPUs), without the
cells that they then predict. `results.md` in this folder holds what it printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.planner_accuracy.report import evaluate, plain
from lightning_3d.errors import Lightning3DError


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and return the exit code: 2 for a file or a number that cannot be used."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.planner_accuracy",
        description="Compare the planner with measured runs.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.csv", help="measured runs, one row each")
    parser.add_argument(
        "--folds",
        type=int,
        default=0,
        metavar="N",
        help="also fit the constants without the cells they predict, N parts",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="only the tables of all runs, for known and for unknown software",
    )
    parser.add_argument(
        "--failed",
        type=Path,
        metavar="FILE.csv",
        help="runs that failed: also show how often a layout that fits is known",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.md", help="write the report here instead of printing it"
    )
    given = parser.parse_args(arguments)
    if given.folds < 0 or given.folds == 1:
        parser.error(f"--folds must be at least 2, or 0 for none; got {given.folds}")
    try:
        text = plain(given.file, given.failed)
        if not given.plain:
            text = f"{evaluate(given.file, given.folds)}\n{text}"
    except Lightning3DError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
