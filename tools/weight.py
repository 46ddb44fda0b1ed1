"""Prints how heavy the code is: tokens, files, modules with one importer, class names used more
than once, and long lines.

    python tools/weight.py [FOLDER ...]

Tokens count neither comments nor docstrings, so that packing statements into one line saves
nothing.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONG = 100
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def tokens(source: str) -> int:
    """Count the tokens of a file without comments, docstrings and layout: neither a comma before a
    closing bracket nor a string that goes on in the next line counts."""
    count = 0
    earlier = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _NOT_CODE:
            continue
        if token.type == tokenize.STRING and token.line.strip().startswith(('"""', "'''")):
            continue
        goes_on = token.type == tokenize.STRING and earlier == "string"
        closes = earlier == "," and token.string in {")", "]", "}"}
        count += (not goes_on) - closes
        earlier = "string" if token.type == tokenize.STRING else token.string
    return count


def imported(tree: ast.Module) -> set[str]:
    """Names of modules that a file imports, and of what it imports from them, which may be modules
    too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def with_one_importer(trees: dict[str, ast.Module]) -> int:
    """Count the modules that exactly one other module imports."""
    importers = Counter(name for tree in trees.values() for name in imported(tree) if name in trees)
    return sum(count == 1 for count in importers.values())


def report(folder: Path) -> str:
    """Describe a folder in one line."""
    sources = {path: path.read_text() for path in sorted(folder.rglob("*.py"))}
    trees = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): ast.parse(text)
        for path, text in sources.items()
    }
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    long = sum(len(line) > LONG for text in sources.values() for line in text.splitlines())
    return (
        f"{folder.name}: {sum(map(tokens, sources.values())):,} tokens, {len(sources)} files,"
        f" {with_one_importer(trees)} modules with one importer,"
        f" {sum(count > 1 for count in classes.values())} class names used more than once, {long:,}"
        f" lines over {LONG} columns"
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or ["lightning_3d", "tests"]:
        print(report((ROOT / name).resolve()))
