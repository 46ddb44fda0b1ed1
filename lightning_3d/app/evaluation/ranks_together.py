"""Rank 0 decides what is computed, and all ranks compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_3d.app.evaluation.engine import EvaluationEngine
from lightning_3d.app.evaluation.generation import Sampling, generate
from lightning_3d.app.evaluation.text import Text

T = TypeVar("T")

_LOOK_BACK = 2
"""Tokens before those of a stop word in which it is looked for too, because other tokens may write
it. `HFLM` has the same number."""


def run_together(
    engine: EvaluationEngine, text: Text, program: Callable[[RanksTogether], T] | None
) -> T | None:
    """Run a program on rank 0, and compute on all ranks what it asks for. Collective.

    Args:
        program: the program, on rank 0; None on the other ranks.

    Returns:
        The result of the program on rank 0; None elsewhere.
    """
    ranks = RanksTogether(engine, text)
    if program is None:
        ranks.serve()
        return None
    result = program(ranks)
    ranks.dismiss()
    return result


class RanksTogether:
    """The model on all ranks, for a program that runs on rank 0 only. A request is broadcast, then
    all ranks compute it.

    Args:
        engine: scores and next tokens.
        text: the tokenizer.

    Attributes:
        batch: texts that are computed at the same time.
    """

    def __init__(self, engine: EvaluationEngine, text: Text) -> None:
        self._engine, self._text, self.batch = engine, text, engine.batch
        self._works: dict[str, Callable[..., Any]] = {
            "score": engine.score,
            "generate": self._generate,
        }

    def serve(self) -> None:
        """Compute the requests of rank 0, on another rank, until `dismiss`."""
        while (request := self._engine.broadcast(None)) is not None:
            name, arguments = request
            self._works[name](*arguments)

    def dismiss(self) -> None:
        """Let the other ranks end. On rank 0 only."""
        self._engine.broadcast(None)

    def score(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        """Score the ends of rows, see `EvaluationEngine.score`. On rank 0 only."""
        return list(self._ask("score", rows))

    def generate(
        self, prompts: Sequence[Sequence[int]], until: Sequence[str], count: int
    ) -> list[list[int]]:
        """Continue prompts greedily by at most `count` tokens, until a word of `until` is written.
        On rank 0 only.

        Returns:
            The new tokens of each prompt, with those of the word.
        """
        return list(self._ask("generate", prompts, until, count))

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._engine.broadcast((name, arguments))
        return self._works[name](*arguments)

    def _generate(
        self, prompts: Sequence[Sequence[int]], until: Sequence[str], count: int
    ) -> list[list[int]]:
        words = [(word, len(self._text.encode(word, special=False)) + _LOOK_BACK) for word in until]

        def ends(new: Sequence[int]) -> bool:
            return any(word in self._text.written(new[-width:]) for word, width in words)

        return generate(
            self._engine, prompts, Sampling(max_new_tokens=count, stop=self._text.stop), ends
        )
