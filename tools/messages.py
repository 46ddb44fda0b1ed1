"""List every message that a user of this software can see, with its place, for reviews of the
wording.

    python tools/messages.py                                the whole list
    python tools/messages.py --kind error --kind warning    some kinds only
    python tools/messages.py --folder lightning_3d/zero     of one folder or file
    python tools/messages.py --long 30                      only those with a sentence of more than 30 words
    python tools/messages.py --grep '\\bbeside\\b'            only those in which a regular expression is found
    python tools/messages.py --random 30 --seed 1           30 of them at random, the same 30 for the same seed

Kinds: `error` (raised), `warning` (warned or logged as such), `output` (printed or logged), `help`
(of commands, and the comments in conf/, which `--help` and the documentation show), and `text`:
what reads like a sentence, but is shown by another function than the one that has it. Messages are
found in the syntax tree: strings that reach raise, warn, print, a logger or argparse; strings that
are returned by functions, or kept in variables, whose names appear there; and every other string
with the look of a sentence, unless it is a docstring. The values of an f-string are shown as {name}
or {…}.
"""  # noqa: E501

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PLACES = ("lightning_3d", "hydra_plugins", "train.py", "conf")
KINDS = ("error", "warning", "output", "help", "text")
"""In order of precedence: a function whose result is both raised and printed builds errors."""

_WARNS = re.compile(r"(^|_)warn(ing|_once)?$|^rank_zero_deprecation$")
_PRINTS = {"print", "rank_zero_info", "rank_zero_debug"}
_LOG_LEVELS = {
    "debug": "output",
    "info": "output",
    "warning": "warning",
    "error": "error",
    "exception": "error",
    "critical": "error",
}
_PARSERS = {
    "ArgumentParser",
    "add_parser",
    "add_argument",
    "add_argument_group",
    "add_subparsers",
    "add_mutually_exclusive_group",
}
_HELP_ARGUMENTS = {"help", "description", "epilog", "usage", "title"}
_HELP_NAME = re.compile(r"USAGE|HELP|EPILOG|DESCRIPTION", re.IGNORECASE)
_EXCEPTION_NAME = re.compile(r"(Error|Exception|Warning|Exit|Interrupt)$")
_UNKNOWN = "{…}"
_CODE = re.compile(
    r"[{};]\s*$|^#!|\w\(\)\s*\{"  # scripts
    r"|^\s*(import|from|def|class|if|for|const|let|var|return)\s.*[:;(]"
    r"|\\[dws]|\)[?*]|\.\*"  # patterns
)
_YAML_COMMENT = re.compile(r"""((?:"[^"]*"|'[^']*'|[^"'#]|(?<=\S)#)*)(?:#\s?(.*))?""")


@dataclass(frozen=True, order=True)
class Message:
    """A message in the source code.

    Attributes:
        path: of the file, relative to the repository.
        line: the first line of the text.
        kind: one of KINDS.
        how: the class of the error, or the function that shows it; empty when it is not known.
        text: the message, with {name} or {…} for what is only known at run time.
    """

    path: str
    line: int
    kind: str
    how: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def words(self) -> str:
        """The text without the names in braces, which no user sees."""
        return re.sub(r"\{[\w.()]*\}", _UNKNOWN, self.text)

    @property
    def longest(self) -> int:
        """Words of the longest sentence; a value counts as one word."""
        sentences = re.split(r"(?<=[.!?])\s+|\n\s*\n|\n(?=\s+-)", self.words)
        return max(len(sentence.split()) for sentence in sentences)


def rendered(node: ast.AST | None) -> str | None:
    """Text of an expression that builds a string; None for one that does not, as far as can be
    seen."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_part(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mod)):
        left, right = rendered(node.left), rendered(node.right)
        if isinstance(node.op, ast.Mod):
            return left
        return (
            None
            if left is None and right is None
            else (left or _value(node.left)) + (right or _value(node.right))
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = rendered(node.func.value)
        return owner if node.func.attr in ("format", "strip", "rstrip", "lstrip") else None
    if isinstance(node, ast.Call) and _called(node) in ("dedent", "cleandoc") and node.args:
        return rendered(node.args[0])
    return None


def _part(part: ast.expr) -> str:
    return (
        str(part.value)
        if isinstance(part, ast.Constant)
        else _value(part.value if isinstance(part, ast.FormattedValue) else part)
    )


def _value(node: ast.expr) -> str:
    """A short name is shown, everything else is {…}."""
    name = ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
    return (
        f"{{{name}}}"
        if len(name) <= 30 and re.fullmatch(r"[\w.]+|type\(\w+\)\.__name__", name)
        else _UNKNOWN
    )


def _called(node: ast.Call) -> str:
    """The last name of what is called: `warn` for `warnings.warn(...)`."""
    return (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )


def is_phrase(text: str, least: int = 2) -> bool:
    """Whether a string has so many words, and does not look like code."""
    plain = re.sub(r"<[^<>]*>|\{[^{}]*\}", " ", text)
    words = re.findall(r"(?<![\w./_=-])[A-Za-z][a-z']*(?![\w/_=(-]|\.\w)", plain)
    return len(words) >= least and _CODE.search(plain) is None


def is_sentence(text: str) -> bool:
    """Whether a string has the look of prose: at least three words, and a capital, a blank or a
    period where one would be."""
    ends = text.rstrip().endswith((".", "!", "?", ":"))
    return is_phrase(text, 3 if ends or text[:1].isupper() or text[:1] == " " else 5)


@dataclass
class _Source:
    """A file with what was found in it.

    Attributes:
        nodes: all nodes of its tree, the module first: a walk through a tree takes longer than
            anything that is done with its nodes.
        taken: ids of the nodes that were listed, or are part of what was listed.
        named: kind and origin by the name of a function or variable whose strings are shown.
    """

    path: str
    nodes: list[ast.AST]
    taken: set[int]
    named: dict[str, tuple[str, str]]
    found: list[Message]


class _Sinks(ast.NodeVisitor):
    """Takes the strings that reach raise, warn, print, a logger or argparse, and notes the names
    that appear there.

    Args:
        errors: names of the error classes.
        showing: kind and origin by the name of a function that shows one of its arguments.
    """

    def __init__(
        self, source: _Source, errors: set[str], showing: dict[str, tuple[str, str]]
    ) -> None:
        self.source, self.errors, self.showing = source, errors, showing

    def visit_Call(self, node: ast.Call) -> None:
        name = _called(node)
        kind = _sink(node, name, self.errors)
        if name in _PARSERS:
            titled = node.args[:1] if name == "add_argument_group" else []
            self._take_all(
                [*titled, *(word.value for word in node.keywords if word.arg in _HELP_ARGUMENTS)],
                "help",
                name,
            )
        elif kind is not None:
            self._take_printed(node, kind, name)
        elif name in self.showing:
            for argument in _arguments(node):
                _take_strings(self.source, ast.walk(argument), *self.showing[name])
        self.generic_visit(node)

    def _take_printed(self, node: ast.Call, kind: str, name: str) -> None:
        """The arguments of `print("a", b)` are one message."""
        if (
            name == "print"
            and len(node.args) > 1
            and any(rendered(argument) for argument in node.args)
        ):
            text = " ".join(rendered(argument) or _value(argument) for argument in node.args)
            _add(self.source, node, kind, name, text)
            for argument in node.args:
                _mark(self.source, argument)
        self._take_all(_arguments(node) if kind == "error" else node.args, kind, name)

    def _take_all(self, arguments: Iterable[ast.expr], kind: str, how: str) -> None:
        for argument in arguments:
            take(self.source, argument, kind, how)


def _arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _sink(node: ast.Call, name: str, errors: set[str]) -> str | None:
    """The kind of what a call shows; None for a call that shows nothing."""
    if _EXCEPTION_NAME.search(name) or name in errors:
        return "error"
    if name in _PRINTS:
        return "output"
    owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if name == "write" and owner in ("sys.stdout", "sys.stderr"):
        return "output"
    if name == "error" and "parser" in owner:
        return "error"
    if name in _LOG_LEVELS and re.search(r"(\b|_)log(ger)?$", owner, re.IGNORECASE):
        return _LOG_LEVELS[name]
    return "warning" if _WARNS.search(name) else None


def take(source: _Source, node: ast.expr, kind: str, how: str) -> None:
    """List the strings of an expression that is shown, and note the names in it."""
    if id(node) in source.taken:
        return
    text = rendered(node)
    if text is not None:
        _add(source, node, kind, how, text)
        _mark(source, node)
    elif isinstance(node, ast.IfExp):
        take(source, node.body, kind, how)
        take(source, node.orelse, kind, how)
        return
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Name, ast.Attribute)):
            _note(source.named, inner.id if isinstance(inner, ast.Name) else inner.attr, kind, how)
        elif (
            inner is not node
            and id(inner) not in source.taken
            and (part := rendered(inner)) is not None
            and is_sentence(part)
        ):
            _add(source, inner, kind, how, part)
            _mark(source, inner)


def _note(named: dict[str, tuple[str, str]], name: str, kind: str, how: str) -> None:
    if name not in named or KINDS.index(kind) < KINDS.index(named[name][0]):
        named[name] = (kind, how)


def _add(source: _Source, node: ast.AST, kind: str, how: str, text: str) -> None:
    """Without words there is nothing to read: a line of dashes, or a value alone."""
    if re.search(r"[A-Za-z]{2}", re.sub(r"\{[^{}]*\}", "", text)):
        source.found.append(Message(source.path, getattr(node, "lineno", 1), kind, how, text))


def _mark(source: _Source, node: ast.AST) -> None:
    """Note that the literal parts of a string were listed; expressions inside an f-string may hold
    more strings."""
    source.taken.add(id(node))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Constant, ast.JoinedStr)) or (
            isinstance(child, ast.BinOp) and rendered(child) is not None
        ):
            _mark(source, child)
        elif isinstance(child, ast.Attribute) and rendered(child.value) is not None:
            _mark(source, child.value)


def _take_named(source: _Source, named: dict[str, tuple[str, str]]) -> None:
    """List the strings that are returned by functions, or kept in variables, whose names appear
    where something is shown."""
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in named:
            for inner in ast.walk(node):
                if isinstance(inner, (ast.Return, ast.Yield)) and inner.value is not None:
                    _take_strings(source, ast.walk(inner.value), *named[node.name], is_phrase)
        elif (
            isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                name = (
                    target.id
                    if isinstance(target, ast.Name)
                    else target.attr
                    if isinstance(target, ast.Attribute)
                    else ""
                )
                kind = "help" if isinstance(target, ast.Name) and _HELP_NAME.search(name) else None
                if kind or name in named:
                    _take_strings(
                        source,
                        ast.walk(node.value),
                        *((kind, "") if kind else named[name]),
                        is_phrase,
                    )


def _take_strings(
    source: _Source,
    nodes: Iterable[ast.AST],
    kind: str,
    how: str,
    wanted: Callable[[str], bool] = is_sentence,
) -> None:
    for inner in nodes:
        if id(inner) not in source.taken and (text := rendered(inner)) is not None and wanted(text):
            _add(source, inner, kind, how, text)
            _mark(source, inner)


def _showing(nodes: Iterable[ast.AST], errors: set[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Functions that show one of their arguments, as `def refuse(reason): raise
    ConfigError(reason)`, with its kind and origin."""
    for function in nodes:
        if isinstance(function, ast.FunctionDef):
            parameters = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Call)
                    and (kind := _sink(node, _called(node), errors)) is not None
                ):
                    names = {
                        inner.id
                        for each in node.args
                        for inner in ast.walk(each)
                        if isinstance(inner, ast.Name)
                    }
                    if names & parameters:
                        yield function.name, (kind, _called(node))


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """String expressions that stand alone: docstrings, and the ones below attributes."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Constant, ast.JoinedStr)):
            yield node.value


def _parts(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The literal parts of f-strings, which are listed with the whole or not at all."""
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield from (part for part in node.values if isinstance(part, ast.Constant))


def _error_classes(trees: Iterable[Iterable[ast.AST]]) -> set[str]:
    """Names of the classes that derive from an exception, over all files."""
    bases = {
        node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for nodes in trees
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    found = {
        name for name, above in bases.items() if any(_EXCEPTION_NAME.search(base) for base in above)
    }
    while more := {
        name for name, above in bases.items() if name not in found and found & set(above)
    }:
        found |= more
    return found


def messages_of_python(files: dict[str, str]) -> list[Message]:
    """The messages in Python files.

    Args:
        files: source code by path.
    """
    trees = {path: list(ast.walk(ast.parse(text))) for path, text in files.items()}
    errors = _error_classes(trees.values())
    showing = dict(pair for nodes in trees.values() for pair in _showing(nodes, errors))
    named: dict[str, tuple[str, str]] = {}
    sources = []
    for path, nodes in trees.items():
        source = _Source(
            path, nodes, {id(node) for node in (*_docstrings(nodes), *_parts(nodes))}, {}, []
        )
        _Sinks(source, errors, showing).visit(nodes[0])
        for name, (kind, how) in source.named.items():
            if len(name) > 3:  # `key`, `path` or `_` are variables everywhere
                _note(named, name, kind, how)
        sources.append(source)
    for source in sources:
        _take_named(source, named | source.named)
        _take_strings(source, source.nodes, "text", "")
    return sorted(message for source in sources for message in source.found)


def messages_of_yaml(path: str, text: str) -> Iterator[Message]:
    """The comments of a configuration file, which the documentation shows, and its blocks of text,
    which `--help` prints."""
    open_comment: Message | None = None
    column = 0
    block: tuple[int, Message] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if block is not None:
            indent, message = block
            if not line.strip() or len(line) - len(line.lstrip()) > indent:
                block = (
                    indent,
                    replace(message, text=f"{message.text}\n{line.strip()}".lstrip("\n")),
                )
                continue
            yield replace(message, text=message.text.rstrip())
            block = None
        parts = _YAML_COMMENT.fullmatch(line)
        before, comment = parts.groups() if parts is not None else (line, None)
        # an instruction for Hydra
        if comment is not None and comment.strip().startswith("@package"):
            continue
        if (
            open_comment is not None
            and comment is not None
            and not before.strip()
            and len(before) == column
        ):
            open_comment = replace(open_comment, text=f"{open_comment.text} {comment.strip()}")
            continue
        if open_comment is not None:
            yield open_comment
        open_comment, column = (
            (
                Message(path, number, "help", "comment", comment.strip())
                if comment is not None
                else None
            ),
            len(before),
        )
        if re.search(r":\s*\|[-+]?$", before):
            block = (len(line) - len(line.lstrip()), Message(path, number + 1, "help", "yaml", ""))
    yield from [open_comment] if open_comment is not None else []
    yield from [replace(block[1], text=block[1].text.rstrip())] if block is not None else []


def messages(root: Path = REPOSITORY, places: Iterable[str] = PLACES) -> list[Message]:
    """All messages below these folders and files of a repository."""
    files = [
        file
        for place in places
        for file in (
            [root / place] if (root / place).is_file() else sorted((root / place).rglob("*"))
        )
    ]
    texts = {
        str(file.relative_to(root)): file.read_text("utf-8")
        for file in files
        if file.suffix in (".py", ".yaml")
    }
    python = messages_of_python(
        {path: text for path, text in texts.items() if path.endswith(".py")}
    )
    yaml = [
        message
        for path, text in texts.items()
        if path.endswith(".yaml")
        for message in messages_of_yaml(path, text)
    ]
    return sorted([*python, *(message for message in yaml if message.text)])


def plain(message: Message) -> str:
    head = f"{message.place}  {message.kind}{f' ({message.how})' if message.how else ''}"
    return "\n    ".join([head, *message.text.strip("\n").splitlines()])


def markdown(message: Message) -> str:
    text = (
        message.text.strip()
        .replace("\\", "\\\\")
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("\n", "<br>")
    )
    return f"| `{message.place}` | {message.kind} | {text} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/messages.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="only this kind; may be given several times"
    )
    parser.add_argument(
        "--folder",
        metavar="PATH",
        help="only messages of this folder or file, relative to the repository",
    )
    parser.add_argument(
        "--long", metavar="N", type=int, help="only messages with a sentence of more than N words"
    )
    parser.add_argument(
        "--grep", metavar="REGEX", help="only messages in which this regular expression is found"
    )
    parser.add_argument("--random", metavar="N", type=int, help="only N messages, chosen at random")
    parser.add_argument(
        "--seed", metavar="S", type=int, default=0, help="of the random choice; default: 0"
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument(
        "--root", metavar="FOLDER", type=Path, default=REPOSITORY, help=argparse.SUPPRESS
    )
    options = parser.parse_args(arguments)
    found = [
        each for each in messages(options.root) if options.kind is None or each.kind in options.kind
    ]
    if options.folder is not None:
        inside = options.folder.rstrip("/")
        found = [
            each for each in found if each.path == inside or each.path.startswith(f"{inside}/")
        ]
    if options.long is not None:
        found = [each for each in found if each.longest > options.long]
    if options.grep is not None:
        found = [each for each in found if re.search(options.grep, each.words)]
    if options.random is not None:
        found = sorted(random.Random(options.seed).sample(found, min(options.random, len(found))))
    if options.markdown:
        print("| place | kind | message |\n| --- | --- | --- |")
    for each in found:
        print(markdown(each) if options.markdown else plain(each))
    counts = Counter(each.kind for each in found)
    print(
        f"{len(found)} messages: "
        + ", ".join(f"{kind} {counts[kind]}" for kind in KINDS if counts[kind]),
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
