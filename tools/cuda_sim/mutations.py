"""Deletes each synchronization of streams in the package in turn, and says whether fits on
simulated GPUs notice.

    .venv-cuda/bin/python tools/cuda_sim/mutations.py [PART_OF_A_PATH ...]     all, or those in files with such a path
    .venv-cuda/bin/python tools/cuda_sim/mutations.py --unchanged              only that the fits pass without a deletion
    .venv-cuda/bin/python tools/cuda_sim/mutations.py --deletions ...          only the deletions

A deletion is caught when a fit fails: by its numbers, by a race or a fault that the simulation
reports, by a hang, or by an error. Prints a table; the exit code is 1 if a deletion was not caught
that is not listed in `HARMLESS` with its reason.
"""  # noqa: E501

from __future__ import annotations

import argparse
import ast
import gc
import importlib.abc
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_3d"
METHODS = ("wait_stream", "wait_event", "synchronize", "record_stream", "wait")
NOT_ON_A_GPU = (
    "checkpoint/store.py",
    "ranks/",
    "storage/",
    "app/launchers/",
    "app/runs/",
    "parallel/gloo_exchange.py",
    "strategy/checkpoint_hooks.py",
    "app/doctor/",
    "parallel/host_channel.py",
    "parallel/host_memory.py",
    "app/cli/plan_validation.py",
    "app/verification/",
)
"""Files whose `wait` is for a thread, a process, gloo or memory that CPU ranks share."""

_KEPT = (
    "torch keeps what travels until it has arrived; tests on gloo count messages that nobody"
    " waits for"
)
_TIMES = "only times change, and the simulation's kernels take none"
HARMLESS = {
    "parallel/pipeline/transport.py _release": (
        "NCCL keeps what it sends until it is sent; this frees the memory of what gloo sends"
    ),
    "parallel/expert/dispatch.py discard": _KEPT,
    "parallel/expert/nodes.py discard": _KEPT,
    "parallel/blocks/offload.py _new": (
        "the simulation waits for the device when it gives page-locked memory back"
    ),
    "app/profiling/operations.py _wait": _TIMES,
    "app/profiling/operations.py _kinds": _TIMES,
    "app/profiling/operations.py send": _TIMES,
    "tracing/marks.py begin": _TIMES,
    "tracing/messages.py _mark_apart": _TIMES,
}
"""Functions whose deletions change nothing that could be noticed, with the reason."""


@dataclass(frozen=True)
class Site:
    """A call that makes the host or a stream wait, or keeps memory for a stream."""

    file: str
    function: str
    line: int
    source: str

    @property
    def key(self) -> str:
        return f"{self.file} {self.function}"


def sites() -> Iterator[Site]:
    """Every such call in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = str(path.relative_to(PACKAGE))
        text = path.read_text()
        if file.startswith(NOT_ON_A_GPU) or not any(f".{method}(" in text for method in METHODS):
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                yield from (
                    Site(file, function.name, node.lineno, ast.unparse(node))
                    for node in ast.walk(function)
                    if _is_site(node)
                )


def _is_site(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    return isinstance(node.value.func, ast.Attribute) and node.value.func.attr in METHODS


class _Delete(ast.NodeTransformer):
    """Deletes one site. What `f(...).wait()` waits for is still called."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.found = False

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not _is_site(node) or node.lineno != self._site.line:
            return node
        self.found = True
        assert isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
        started = node.value.func.value
        kept: ast.stmt = (
            ast.Expr(started)
            if isinstance(started, ast.Call) and node.value.func.attr == "wait"
            else ast.Pass()
        )
        return ast.copy_location(kept, node)


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module of the package without one call."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._path = PACKAGE / site.file
        parts = Path("lightning_3d", site.file).with_suffix("").parts
        self._name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return (
            importlib.util.spec_from_file_location(name, self._path, loader=self)
            if name == self._name
            else None
        )

    def exec_module(self, module: ModuleType) -> None:
        delete = _Delete(self._site)
        tree = ast.fix_missing_locations(delete.visit(ast.parse(self._path.read_text())))
        assert delete.found, self._site
        exec(compile(tree, str(self._path), "exec"), module.__dict__)


def _fits(site: Site | None) -> list[Callable[[], None]]:
    """The fits that may notice a deletion, those made for this file first; all for None. Imported
    where the package is mutated."""
    import mutation_fits
    import preloaded  # noqa: F401  once for all ranks of all fits

    if site is None:
        return [fit for _, fit in mutation_fits.FITS]
    matching = [
        (max((len(part) for part in parts.split() if part in site.file), default=0), fit)
        for parts, fit in mutation_fits.FITS
    ]
    return [fit for length, fit in sorted(matching, key=lambda match: -match[0]) if length]


def _in_child(site: Site | None) -> str:
    """Run the fits for a site in a process of its own; how it was noticed, empty if it was not."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            if site is not None:
                sys.meta_path.insert(0, _Mutated(site))
            os.write(writer, _noticed(site).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def _noticed(site: Site | None) -> str:
    try:
        for fit in _fits(site):
            fit()
    except BaseException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
            type(error).__name__
        ]
        telling = [
            line
            for line in lines
            if any(word in line for word in ("RACE", "HANG", "MISMATCH", "Error", "differ", "nan"))
        ]
        return (telling or lines)[0][:300]
    return ""


def _preload() -> None:
    """Everything that ranks import except the package, which is imported anew for each deletion."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "DS_ACCELERATOR": "cuda",
        "PARITY_STEPS": "3",
    }
    sys.path[:0] = [
        str(ROOT),
        str(ROOT / "tests" / "support"),
        str(ROOT / "tests" / "cuda"),
        str(ROOT / "tools" / "cuda_sim"),
    ]
    blocked: Any = None
    # it would initialize CUDA, and this process could not be forked any more
    sys.modules["torchao"] = blocked
    models = [
        f"transformers.models.{name}.modeling_{name}"
        for name in ("llama", "qwen2", "olmo2", "deepseek_v3")
    ]
    for name in (
        "torch",
        "torch.distributed.pipelining.schedules",
        "lightning.pytorch",
        *models,
        "peft",
        "deepspeed",
    ):
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy all pages


def _chosen(words: Sequence[str]) -> list[Site]:
    return [site for site in sites() if not words or any(word in site.file for word in words)]


def _delete(chosen: Sequence[Site]) -> int:
    """Delete one site after the other; the number of those that nobody noticed."""
    missed = 0
    for site in chosen:
        started = time.monotonic()
        noticed = _in_child(site)
        reason = HARMLESS.get(site.key)
        missed += not noticed and reason is None
        verdict = "caught" if noticed else f"harmless: {reason}" if reason else "NOT CAUGHT"
        seconds = time.monotonic() - started
        print(
            f"{site.file}:{site.line} {site.function}: {site.source}\n    {verdict} ({seconds:.0f}"
            f" s) {noticed}",
            flush=True,
        )
    print(f"{len(chosen)} deletions, {missed} not caught")
    return missed


def main() -> int:
    """Run the fits without a deletion, then delete each site; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", metavar="PART_OF_A_PATH")
    parser.add_argument("--unchanged", action="store_true", help="delete nothing")
    parser.add_argument(
        "--deletions", action="store_true", help="believe that the fits pass without a deletion"
    )
    wanted = parser.parse_args()
    _preload()
    with tempfile.TemporaryDirectory(prefix="references_") as folder:
        # the fits of all deletions share what one process computes
        os.environ.setdefault("SIMULATED_REFERENCES", folder)
        failed = "" if wanted.deletions else _in_child(None)
        if failed:
            print(f"the fits fail without any deletion: {failed}")
        return 1 if failed or (not wanted.unchanged and _delete(_chosen(wanted.words))) else 0


if __name__ == "__main__":
    sys.exit(main())
