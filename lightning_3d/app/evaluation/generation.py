"""Text after a prompt: greedy or sampled, token by token.

Every token needs a forward of the whole text: there is no cache of keys and values. That is exact
in every layout, and takes a time proportional to the square of the length, which is enough for a
look at a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_3d.app.evaluation.engine import EvaluationEngine


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: tokens after the prompt, at most.
        temperature: divides the logits; 0 always takes the most probable token.
        top_k: number of most probable tokens to choose from; None: all.
        top_p: smallest probability that the most probable tokens to choose from have together; 1.0:
            all.
        seed: seed of the choice.
        stop: tokens that end a text; they are not part of it.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop: frozenset[int] = frozenset()


def generate(
    engine: EvaluationEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    ends: Callable[[Sequence[int]], bool] | None = None,
) -> list[list[int]]:
    """Continue prompts. All ranks draw from the same random stream, and use the tokens of rank 0.

    Args:
        prompts: token ids, at least one for each prompt.
        ends: function of the new tokens that ends a text, for example because a word was written.

    Returns:
        The new tokens of each prompt.

    Raises:
        ConfigError: prompt and new tokens are longer than the model takes.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    texts: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    for _ in range(sampling.max_new_tokens):
        if not active:
            break
        logits = engine.next_logits([[*prompts[index], *texts[index]] for index in active])
        tokens = engine.agree([choose(row, sampling, generator) for row in logits])
        for index, token in zip(active, tokens, strict=True):
            if token not in sampling.stop:
                texts[index].append(token)
        active = [
            index
            for index, token in zip(active, tokens, strict=True)
            if token not in sampling.stop and not (ends is not None and ends(texts[index]))
        ]
    return texts


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose a token by its logits, (vocabulary,)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits, sampling), 1, generator=generator))


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probability of each token, (vocabulary,) of float64: temperature first, then
    top_k, then top_p, as in Transformers."""
    scores = logits.double() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, places = scores.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        scores = scores.index_fill(-1, places[before >= sampling.top_p], -torch.inf)
    return scores.softmax(-1)
