"""`lightning-3d generate`: text of a trained model after a prompt, in any layout. torch is imported
after all checks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from lightning_3d.app.cli.evaluate import MODEL, TOKENIZER
from lightning_3d.app.cli.find_checkpoint import AVERAGE, find_checkpoint, require_average
from lightning_3d.app.cli.options import Command, whole_number
from lightning_3d.app.evaluation.job import check
from lightning_3d.app.evaluation.job import run as run_ranks
from lightning_3d.app.evaluation.subject import find_subject
from lightning_3d.app.evaluation.text import find_tokenizer, open_text, stop_tokens
from lightning_3d.app.training.job import prepare_rank
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.environment import OutsideRank, print_once

COMMAND = Command(
    "generate",
    "Print the text that a trained model writes after a prompt, in the layout of its run or in"
    " another one. Each token needs a forward of the whole text (there is no cache of keys and"
    " values): this is for a look at a model, not for serving it.",
    examples=[
        'outputs/run "def main" --max-new-tokens 100',
        'my-model "Once upon a time" parallelism=tp2 --temperature 0.8 --top-p 0.95 --seed 1',
    ],
)


def _number(
    name: str, least: float, most: float | None = None, *, open_end: bool = False
) -> Callable[[str], float]:
    """Make the argparse type of an option whose value is a number in a range; `open_end` excludes
    the least."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if (
            not (least < value if open_end else least <= value)
            or value == float("inf")
            or (most is not None and value > most)
        ):
            words = f"{'more than' if open_end else 'at least'} {least:g}" + (
                f" and at most {most:g}" if most is not None else ""
            )
            raise ConfigError(
                f"{name} must be a number of {words}; got {text or 'an empty string'}."
            )
        return value

    return read


COMMAND.argument("MODEL", MODEL)
COMMAND.argument("PROMPT", "text to continue, in quotes")
COMMAND.count("--max-new-tokens", "largest number of tokens to generate; default: 64", default=64)
COMMAND.option(
    "--temperature",
    "T",
    "divides the logits; 0 always takes the most probable token; default: 0",
    type=_number("--temperature", 0),
    default=0.0,
)
COMMAND.count("--top-k", "choose among the N most probable tokens; default: all")
COMMAND.option(
    "--top-p",
    "P",
    "choose among the most probable tokens that have this probability together; default: 1",
    type=_number("--top-p", 0, 1, open_end=True),
    default=1.0,
)
COMMAND.option(
    "--seed", "N", "seed of the choice; default: 0", type=whole_number("--seed"), default=0
)
COMMAND.flag("--average", AVERAGE)
COMMAND.option("--tokenizer", "FOLDER", TOKENIZER)


def run(arguments: list[str], outside: OutsideRank | None) -> int:
    """Run the command and return the exit code.

    Args:
        outside: this process as a rank that torchrun or SLURM started; None: the ranks are started
            here.
    """
    return COMMAND.run(
        arguments, lambda options, overrides: _run(options, overrides, outside), outside=outside
    )


def _run(options: Namespace, overrides: Sequence[str], outside: OutsideRank | None) -> int:
    subject = find_subject(find_checkpoint(options.model), options.model)
    if options.average:
        require_average(subject.path)
    tokenizer = find_tokenizer(subject, options.tokenizer)
    evaluation = check(subject, overrides, outside, reads_data=False)
    if not options.prompt:
        raise ConfigError("PROMPT must have at least one character.")
    print_once(evaluation.describe(), outside)
    sampling = {
        name: getattr(options, name)
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    }
    request = {
        "prompt": options.prompt,
        "tokenizer": tokenizer,
        "stop": stop_tokens(subject),
        "sampling": sampling,
    }
    request["average"] = options.average
    return run_ranks(evaluation, generate_rank, request, outside)


def generate_rank(config: dict[str, Any], checkpoint: str | None, request: dict[str, Any]) -> None:
    """Generate in one rank. Rank 0 prints the text."""
    prepare_rank(config)
    from lightning_3d.app.evaluation.engine import EvaluationEngine
    from lightning_3d.app.evaluation.generation import Sampling, generate
    from lightning_3d.app.evaluation.session import Session

    text = open_text(request["tokenizer"], request["stop"])
    sampling = Sampling(**request["sampling"], stop=text.stop)
    prompt = text.encode(request["prompt"])
    session = Session(config, checkpoint, average=request.get("average", False))
    session.require_fits(prompt, sampling.max_new_tokens)
    new = session.work(
        lambda trainer: generate(EvaluationEngine(trainer, session.max_length), [prompt], sampling)[
            0
        ]
    )
    if session.trainer.is_global_zero:
        print(request["prompt"] + text.decode(new), flush=True)
