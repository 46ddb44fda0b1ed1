"""Tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) on a model in any layout.

Import this module only where lm-eval is installed (extra `eval`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval import simple_evaluate, utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager

from lightning_3d.errors import ConfigError, did_you_mean
from lightning_3d.evaluation.engine import Engine
from lightning_3d.evaluation.generation import Sampling, generate
from lightning_3d.evaluation.text import Text

_LONGEST = 2048  # tokens, where the model does not say how many it takes: as lm-eval's HFLM
_NEW_TOKENS = 256  # as lm-eval's HFLM


@dataclass(frozen=True)
class Tasks:
    """Tasks to run: arguments of `lm_eval.simple_evaluate`.

    Attributes:
        names: names of tasks, groups or tags.
        limit: examples of each task; None: all.
        num_fewshot: examples in front of each question; None: as many as the task says.
        include_path: folder with tasks of your own; None: lm-eval's alone.
    """

    names: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: str | None = None

    def manager(self) -> Any:
        """Make lm-eval's index of tasks."""
        return TaskManager(include_path=self.include_path)


class LayoutLM(TemplateLM):
    """The `LM` interface of lm-eval over an `Engine`. All ranks make the same requests, and together they are one model.

    Tokens, truncation and stop words are those of lm-eval's own `HFLM`.

    Args:
        engine: the model.
        text: its tokenizer.
    """

    def __init__(self, engine: Engine, text: Text) -> None:
        super().__init__()
        self._engine, self._text = engine, text
        self.max_length = engine.max_length or _LONGEST

    @property
    def eot_token_id(self) -> int:
        return self._text.end

    @property
    def prefix_token_id(self) -> int:
        return self._text.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None and has_bos_prefix(string, self._text.written(self.prefix_token_id)):
            add_special_tokens = False
        return self._text.encode(string, special=add_special_tokens)

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any) -> list[tuple[float, bool]]:
        # One token more than the model takes: the last one is only predicted.
        return self._engine.score([([*context, *rest][-(self.max_length + 1) :], len(rest)) for _, context, rest in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in windows that do not overlap, after lm-eval's rules."""
        windows: list[tuple[int, tuple[list[int], list[int]]]] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            rolling = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(number, utils.make_disjoint_window(window)) for window in rolling]
        found = self._loglikelihood_tokens([(None, *window) for _, window in windows])
        totals = [0.0] * len(requests)
        for (number, _), (total, _) in zip(windows, found, strict=True):
            totals[number] += total
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts until a stop word. Requests with equal options are continued together."""
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            prompts = [requests[number].args[0] for number in numbers]
            for number, text in zip(numbers, self._continue(prompts, requests[numbers[0]].args[1]), strict=True):
                texts[number] = text
        return texts

    def _continue(self, prompts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        given = normalize_gen_kwargs(dict(options), _NEW_TOKENS)
        until = [given["until"]] if isinstance(given.get("until"), str) else list(given.get("until") or [])
        room = self.max_length - given["max_gen_toks"]
        if room < 1:
            raise ConfigError(
                f"A task generates {given['max_gen_toks']} tokens, but the model takes only {self.max_length}, prompt included. Leave"
                " it out."
            )
        sampling = Sampling(
            max_new_tokens=given["max_gen_toks"],
            temperature=given["temperature"] if given["do_sample"] else 0.0,
            top_k=given.get("top_k") or None,
            top_p=given.get("top_p", 1.0),
            stop=self._text.stop,
        )
        tokens = [self.tok_encode(prompt)[-room:] for prompt in prompts]
        found = generate(self._engine, tokens, sampling, ends=lambda new: any(word and word in self._text.decode(new) for word in until))
        return [postprocess_generated_text(self._text.decode(new), until, None) for new in found]


def require_tasks(tasks: Tasks) -> None:
    """Refuse a task that lm-eval does not have.

    Raises:
        ConfigError: with the nearest names.
    """
    known = tasks.manager().all_tasks
    for name in tasks.names:
        if name not in known:
            where = f" and {tasks.include_path}" if tasks.include_path else ""
            raise ConfigError(f'--tasks: lm-eval{where} has no task "{name}".{did_you_mean(name, known)} `lm-eval ls tasks` lists them.')


def run_tasks(engine: Engine, text: Text, tasks: Tasks, *, bootstraps: bool) -> dict[str, dict[str, Any]]:
    """Run tasks on all ranks.

    Args:
        bootstraps: whether to compute the standard errors that need many random samples; one rank is enough.

    Returns:
        Task -> metric -> value, as lm-eval names them ("acc,none"); on the first rank of each node, elsewhere nothing.
    """
    found = simple_evaluate(
        model=LayoutLM(engine, text),
        tasks=list(tasks.names),
        num_fewshot=tasks.num_fewshot,
        limit=tasks.limit,
        task_manager=tasks.manager(),
        log_samples=False,
        bootstrap_iters=100000 if bootstraps else 0,
    )
    if found is None:  # lm-eval gives results only where LOCAL_RANK is 0
        return {}
    return {
        name: {key: value for key, value in metrics.items() if isinstance(value, (int, float)) and "," in key}
        for name, metrics in found["results"].items()
    }
