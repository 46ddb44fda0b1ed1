"""A model in any layout as lm-eval sees one. Tokenizes, truncates and stops as lm-eval's `HFLM`
does, so that the results are the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from typing_extensions import override

from lightning_3d.app.evaluation.ranks_together import RanksTogether
from lightning_3d.app.evaluation.text import Text
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.progress import task

NEW_TOKENS = 256
"""New tokens of a task that does not say how many, as in `HFLM`."""


class TaskLM(TemplateLM):
    """Answers the requests of tasks on rank 0. All ranks compute; see `RanksTogether`.

    Args:
        ranks: the model.
        text: its tokenizer.
        max_length: tokens that it takes.
        vocabulary: number of its token ids.
    """

    def __init__(self, ranks: RanksTogether, text: Text, max_length: int, vocabulary: int) -> None:
        super().__init__()
        self._ranks, self._text, self.max_length, self._vocabulary = (
            ranks,
            text,
            max_length,
            vocabulary,
        )
        self.tokenizer: Any = getattr(text, "inner", None)

    @property
    @override
    def eot_token_id(self) -> int:
        return self._text.end

    @property
    @override
    def prefix_token_id(self) -> int:
        return self._text.prefix

    @property
    @override
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @override
    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation as the tokenizer's template does. If the template refuses the
        system's turn, warn and leave it out, as lm-eval's `HFLM` does."""
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, **options))
        except TemplateError:
            turns = [turn for turn in chat_history if turn["role"] != "system"]
            if len(turns) == len(chat_history):
                raise
            warnings.warn(
                "The chat template of the tokenizer takes no system turn: prompts are written"
                " without it.",
                stacklevel=2,
            )
            return str(self.tokenizer.apply_chat_template(turns, **options))

    @override
    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        if add_special_tokens is None and string.startswith(
            self._text.written([self._text.prefix])
        ):
            add_special_tokens = False
        return self._text.encode(string, add_special_tokens)

    @override
    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    @override
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._row(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for chosen in self._batches(order, "scoring texts"):
            for index, result in zip(
                chosen, self._ranks.score([rows[index] for index in chosen]), strict=True
            ):
                results[index] = result
        return results

    @override
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            found = [
                make_disjoint_window(pair)
                for pair in get_rolling_token_windows(
                    tokens, self.prefix_token_id, self.max_length, 1
                )
            ]
            windows += [(None, context, continuation) for context, continuation in found]
            counts.append(len(found))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    @override
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        prompts = [self._prompt(*request.args) for request in requests]
        order = sorted(
            range(len(prompts)),
            key=lambda index: (repr(prompts[index][1:]), -len(prompts[index][0])),
        )
        texts = [""] * len(prompts)
        for chosen in self._batches(
            order, "generating texts", lambda index: repr(prompts[index][1:])
        ):
            until, count = prompts[chosen[0]][1:]
            for index, new in zip(
                chosen,
                self._ranks.generate([prompts[index][0] for index in chosen], until, count),
                strict=True,
            ):
                texts[index] = postprocess_generated_text(self._text.decode(new), until, None)
        return texts

    def _row(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """Join a context and its continuation, without what does not fit on the left. The last
        token is only predicted."""
        if not context or not 0 < len(continuation) <= self.max_length:
            raise ConfigError(
                f"A text of the task has {len(context)} tokens of context and {len(continuation)}"
                f" to score; at least one of each is needed, and at most {self.max_length} can be"
                " scored."
            )
        row = (context + continuation)[-(self.max_length + 1) :]
        self._require_known(row)
        return row, len(continuation)

    def _prompt(self, context: str, arguments: dict[str, Any]) -> tuple[list[int], list[str], int]:
        """Return the tokens of a prompt, shortened on the left, the words that end its text, and
        the number of new tokens."""
        arguments = normalize_gen_kwargs(arguments, NEW_TOKENS)
        until = handle_stop_sequences(
            arguments["until"], self._text.written([self._text.end]) if self._text.stop else None
        )
        count = arguments["max_gen_toks"]
        if count >= self.max_length:
            raise ConfigError(
                f"The task asks for {count} new tokens; the model takes {self.max_length} tokens"
                " together with the prompt."
            )
        begin = getattr(self.tokenizer, "bos_token", None)
        tokens = self._text.encode(
            context, False if begin is not None and context.startswith(begin) else None
        )[count - self.max_length :]
        if not tokens:
            raise ConfigError("A prompt of the task has no tokens.")
        self._require_known(tokens)
        return tokens, until, count

    def _require_known(self, tokens: Sequence[int]) -> None:
        if max(tokens) >= self._vocabulary:
            raise ConfigError(
                f"The tokenizer gives token {max(tokens)}, but the model has ids from 0 to"
                f" {self._vocabulary - 1}. Use the tokenizer of the model, with --tokenizer FOLDER."
            )

    def _batches(
        self, order: Sequence[int], what: str, kind: Callable[[int], str] = lambda index: ""
    ) -> Iterator[Sequence[int]]:
        """Divide requests into batches of one kind, and show how many are done."""
        with task(what, len(order), "texts") as advance:
            first = 0
            while first < len(order):
                end = first + 1
                while end < min(len(order), first + self._ranks.batch) and kind(order[end]) == kind(
                    order[first]
                ):
                    end += 1
                yield order[first:end]
                advance(end - first)
                first = end


def positions_of(config: Any, text: Text) -> int:
    """Return the tokens that a model takes, by the rule of `HFLM`: its configuration says it, else
    its tokenizer, else it is 2048."""
    return resolve_max_length(config, getattr(text, "inner", None))
