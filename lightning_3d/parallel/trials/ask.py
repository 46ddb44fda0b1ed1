"""Questions about modules, each answered once for all modules that run the same code on the same
sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_3d.compat.torch import real_values
from lightning_3d.models.code_description import code_and_sizes
from lightning_3d.parallel.undone import undone

Answer = TypeVar("Answer")

_answers: dict[Any, Any] = {}
"""(question, kind of module, further arguments) -> answer."""


def ask(question: Callable[..., Answer], module: nn.Module, *more: Any) -> Answer:
    """Return what `question(module, *more)` answers, on the CPU, without gradients. No rank
    communicates, and the module may be on meta.

    What the module's code changes while it runs is as before afterwards. A module of which
    something has no description is asked again each time.

    Args:
        question: function of a module that runs clones of it. Its answer may depend on the module's
            code and sizes, and on `more` only.
        module: the module.
        more: hashable arguments of the question.
    """
    kind = code_and_sizes(module)
    known = (question, kind, more)
    if kind is not None and known in _answers:
        answer: Answer = _answers[known]
        return answer
    with undone(module), real_values(), torch.device("cpu"), torch.no_grad():
        answer = question(module, *more)
    if kind is not None:
        _answers[known] = answer
    return answer
