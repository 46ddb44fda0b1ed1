"""The command line of one command: options by argparse, Hydra overrides, and one layout for
`--help`. Imports no torch."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from lightning_3d.app.config.override_words import quoted
from lightning_3d.errors import ConfigError, Lightning3DError, did_you_mean, is_full, listed
from lightning_3d.ranks.environment import OutsideRank, print_once
from lightning_3d.ranks.progress import shown as progress_shown

OVERRIDES = "[OVERRIDES]"
_HELP = ("-h", "--help")
_WIDTH, _COLUMN = 120, 26
_TAKES_RUN = (
    "GROUP=NAME, KEY=VALUE",
    "the run, as in lightning-3d train GROUP=NAME KEY=VALUE; see lightning-3d train --help",
)

Action = Callable[[argparse.Namespace, list[str]], int]
"""Function that does the work of a command: (its options, the overrides of the run) -> exit
code."""


class Command:
    """A command: its options, its help, and how it ends.

    Args:
        name: the word after `lightning-3d`.
        summary: what the command does, for `--help`.
        takes: placeholders after the options in the usage line: OVERRIDES, or nothing if the
            command takes no run.
        examples: command lines, each after `lightning-3d NAME`.
        hints: advice for options that the command does not have.
        progress: whether to show on stderr what the command is doing; False for one that shows its
            steps itself.
    """

    def __init__(
        self,
        name: str,
        summary: str,
        *,
        takes: str = OVERRIDES,
        examples: Sequence[str] = (),
        hints: Mapping[str, str] | None = None,
        progress: bool = True,
    ) -> None:
        self.name, self._summary, self._takes, self._examples, self._hints = (
            name,
            summary,
            takes,
            examples,
            dict(hints or {}),
        )
        self._progress = progress
        self._parser = _Parser(f"lightning-3d {name}")
        self._arguments: list[tuple[str, str]] = []
        self._options: list[tuple[str, str]] = []
        self._words: list[tuple[str, str]] = [_TAKES_RUN] if takes.endswith(OVERRIDES) else []
        self._first_sections: list[tuple[str, list[tuple[str, str]]]] = []
        self._sections: list[tuple[str, list[tuple[str, str]]]] = []

    def argument(self, name: str, meaning: str) -> None:
        """Add a word that must be given; the command then takes no overrides."""
        self._parser.add_argument(name.lower().partition(".")[0], metavar=name)
        self._arguments.append((name, meaning))

    def option(self, name: str, value: str, meaning: str, **settings: Any) -> None:
        """Add `--name VALUE`; `settings` are passed to argparse."""
        self._parser.add_argument(name, metavar=value, **settings)
        shown = f"{name} [{value}]" if settings.get("nargs") == "?" else f"{name} {value}"
        self._options.append((shown, meaning))

    def count(self, name: str, meaning: str, default: int | None = None) -> None:
        """Add `--name N`, a whole number of at least 1."""
        self.option(name, "N", meaning, type=whole_number(name, least=1), default=default)

    def choice(
        self,
        name: str,
        value: str,
        choices: Sequence[str],
        meaning: str,
        default: str | None = None,
        unset: str = "",
    ) -> None:
        """Add `--name VALUE` for one of several words. `unset` explains what happens without it."""

        def read(text: str) -> str:
            if text not in choices:
                raise ConfigError(
                    f"{name} must be {listed(choices, last='or')}; got"
                    f' "{text}".{did_you_mean(text, choices)}'
                )
            return text

        without = f"; default: {unset}" if unset else ""
        self.option(
            name,
            value,
            f"{meaning}: {listed(choices, last='or')}{without}",
            type=read,
            default=default,
        )

    def flag(self, name: str, meaning: str) -> None:
        """Add `--name`, which takes no value."""
        self._parser.add_argument(name, action="store_true")
        self._options.append((name, meaning))

    def word(self, form: str, meaning: str) -> None:
        """Explain a word among the overrides, such as `rank=N`."""
        self._words.append((form, meaning))

    def section(self, title: str, rows: list[tuple[str, str]], *, first: bool = False) -> None:
        """Explain a further group of words, such as the options of a launcher, at the end of the
        help or before the options."""
        (self._first_sections if first else self._sections).append((title, rows))

    def run(
        self,
        arguments: Sequence[str],
        action: Action,
        *,
        outside: OutsideRank | None = None,
        shown: tuple[type[Exception], ...] = (OSError,),
    ) -> int:
        """Run the command and return the exit code.

        Args:
            arguments: words after the command's name.
            outside: this process as a rank that torchrun or SLURM started; then only rank 0 prints
                help and messages.
            shown: errors whose text is enough: exit code 1 without a traceback.
        """
        if set(arguments) & {*_HELP}:
            print_once(self.help().rstrip(), outside)
            return 0
        with progress_shown() if self._progress else nullcontext():
            return guarded(
                lambda: action(*self.parse(arguments)),
                shown=shown,
                silent=outside is not None and outside.rank > 0,
            )

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Separate the options of this command from the overrides of the run.

        Returns:
            The options, and all words that are neither options nor their values, in order.

        Raises:
            ConfigError: an option does not exist or has no value, a word is missing, or a word is
                left in a command without overrides.
        """
        try:
            options, rest = self._parser.parse_known_args(list(arguments))
        except argparse.ArgumentError as error:
            raise ConfigError(self._explain(error)) from None
        unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]
        if unknown:
            raise ConfigError(self._no_such_option(unknown[0]))
        if rest and not self._takes:
            raise ConfigError(
                f'lightning-3d {self.name} does not take "{rest[0]}". {self._see_help()}'
            )
        return options, [quoted(word) for word in rest]

    def _no_such_option(self, word: str) -> str:
        if word in self._hints:
            return self._hints[word]
        names = [form.split()[0] for form, _ in self._options]
        near = did_you_mean(word, [*names, *self._hints])
        return (
            f"lightning-3d {self.name} has no option {word}.{near} Its options:"
            f" {', '.join([*names, '--help'])}."
        )

    def _explain(self, error: argparse.ArgumentError) -> str:
        """Rewrite an error of argparse as our messages are written."""
        if "expected one argument" in error.message:
            return f"{error.argument_name} needs a value. {self._see_help()}"
        if "ignored explicit argument" in error.message:
            return f"{error.argument_name} takes no value. {self._see_help()}"
        return (
            f"{f'{error.argument_name}: ' if error.argument_name else ''}{error.message}."
            f" {self._see_help()}"
        )

    def _see_help(self) -> str:
        return f"See lightning-3d {self.name} --help."

    def help(self) -> str:
        """Return the text of `--help`, in the same layout for all commands."""
        usage = " ".join(
            [
                "lightning-3d",
                self.name,
                *(name for name, _ in self._arguments),
                "[OPTIONS]",
                self._takes,
            ]
        ).rstrip()
        options = [*self._options, (", ".join(_HELP), "show this help and exit")]
        blocks = [
            f"Usage: {usage}",
            *(
                textwrap.fill(part, _WIDTH, break_on_hyphens=False)
                for part in self._summary.split("\n\n")
            ),
        ]
        if self._examples:
            blocks.append(
                "\n".join(
                    [
                        "Examples:",
                        *(f"  lightning-3d {self.name} {line}" for line in self._examples),
                    ]
                )
            )
        sections = [
            ("Arguments", self._arguments),
            *self._first_sections,
            ("Options", options),
            ("Overrides", self._words),
        ]
        sections += self._sections
        blocks += [f"{title}:\n{table(rows)}" for title, rows in sections if rows]
        return "\n\n".join(blocks) + "\n"


def whole_number(name: str, least: int = 0) -> Callable[[str], int]:
    """Make the argparse type of an option whose value is a whole number of at least `least`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise ConfigError(
                f"{name} must be a whole number of at least {least}; got"
                f" {text or 'an empty string'}."
            )
        return int(text)

    return read


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Format words and their meanings in two columns; a long word gets its own line."""
    lines = []
    for form, meaning in rows:
        words = textwrap.wrap(meaning, _WIDTH - _COLUMN, break_on_hyphens=False) or [""]
        if len(form) + 4 > _COLUMN:
            lines.append(f"  {form}")
            form = ""
        lines.append(f"  {form}".ljust(_COLUMN) + words[0])
        lines += [" " * _COLUMN + word for word in words[1:]]
    return "\n".join(line.rstrip() for line in lines)


class _Parser(argparse.ArgumentParser):
    """Parser that raises instead of printing and ending the process."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False, exit_on_error=False)

    def error(self, message: str) -> Any:
        """Raise ConfigError for what argparse does not report as an `ArgumentError`: required words
        that are missing."""
        missing = re.fullmatch(r"the following arguments are required: (.*)", message)
        what = f"{listed(missing[1].split(', '))} must be given" if missing else message
        raise ConfigError(f"{what}. See {self.prog} --help.")


# Run a command to its exit code: one message for what the user can repair, a traceback for
# everything else.


def guarded(
    action: Callable[[], int], *, shown: tuple[type[Exception], ...] = (), silent: bool = False
) -> int:
    """Run a command and return its exit code.

    Args:
        shown: errors whose text is enough: exit code 1 without a traceback.
        silent: print no message, because another rank prints it.
    """
    try:
        code = action()
        # flush here, where a closed pipe raises BrokenPipeError; at exit Python would only print a
        # complaint
        sys.stdout.flush()
        return code
    except Lightning3DError as error:
        if not silent:
            print(f"lightning_3d: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as end:
        # Lightning's Trainer ends the process with 1 then
        if isinstance(end.__context__, KeyboardInterrupt):
            return 128 + signal.SIGINT
        raise
    except BrokenPipeError:
        # `| head`; Python would complain again when it flushes standard output at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        from lightning_3d.app.config.explain import explain, is_composition_error

        if is_composition_error(error):  # some are OSErrors
            if not silent:
                print(f"lightning_3d: {explain(error)}", file=sys.stderr)
            return Lightning3DError.exit_code
        if is_full(error) or isinstance(error, shown):
            # a full disk affects all ranks; any other error may affect only this one
            if not (silent and is_full(error)):
                print(f"lightning_3d: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1
