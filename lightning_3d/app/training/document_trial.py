"""A trial that shows whether a model keeps the documents of a packed sample apart when their
positions restart.

A small copy of the model (`document_copy`) runs on a few random tokens with random weights, in
float64 on the CPU: once on samples of several documents, and once on each document alone. Every
result must be the same. The kernels of FlashAttention are replaced (`document_kernels`). No rank
communicates, and the model may be on meta.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.app.training.data.documents import restarting_positions
from lightning_3d.app.training.document_copy import IDS, trial_copy
from lightning_3d.app.training.document_inputs import arguments_of
from lightning_3d.app.training.document_kernels import on_the_cpu
from lightning_3d.compat.torch import real_values
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.trials.tolerances import SAME_TOKENS
from lightning_3d.parallel.trials.values import FewRows, generator_of
from lightning_3d.parallel.undone import undone

_DOCUMENTS = ((5, 4, 3), (2, 1, 9))
"""Tokens of the documents of each sample."""


def require_separate_documents(model: nn.Module) -> None:
    """Refuse a model whose results in a document of a packed sample differ from those of the
    document alone.

    Args:
        model: a whole causal LM of Transformers.

    Raises:
        ConfigError: names the model.
    """
    name = type(model).__name__
    works = (
        "Use data.document_mask=false, or a model that attends with rotary positions and full or"
        " sliding attention, such as Llama."
    )
    with real_values(), torch.device("cpu"), torch.no_grad(), undone(model), on_the_cpu():
        try:
            values = FewRows()
            copied = trial_copy(model, values)
            with values:
                difference = _largest_difference(copied)
        except Exception as error:
            said = " ".join(str(error).split())
            raise ConfigError(
                f"data.document_mask=true cannot be used with {name}: a trial on a few tokens with"
                f" position_ids ended with {type(error).__name__}: {said[:200].rstrip('.')}."
                f" {works}"
            ) from error
    if not difference <= SAME_TOKENS:
        raise ConfigError(
            f"data.document_mask=true cannot be used with {name}: its results in a document depend"
            " on the other documents of the sample, although positions restart (by"
            f" {difference:.1e} in a trial on a few tokens). {works}"
        )


def _largest_difference(model: nn.Module) -> float:
    """Return the largest difference of outputs between packed documents and each document alone,
    relative to the largest output."""
    generator = generator_of("tokens")
    length = sum(_DOCUMENTS[0])
    ids = torch.randint(3, IDS // 2, (len(_DOCUMENTS), length), generator=generator)
    begins = torch.zeros(ids.shape, dtype=torch.bool)
    begins[0, _starts(_DOCUMENTS[0])] = begins[1, _starts(_DOCUMENTS[1])] = True
    places = [
        (row, start, size)
        for row, sizes in enumerate(_DOCUMENTS)
        for start, size in zip(_starts(sizes), sizes, strict=True)
    ]
    # The results of causal models do not depend on the tokens that follow.
    first = torch.stack([ids[row].roll(-start) for row, start, _ in places])
    positions = torch.stack([restarting_positions(row) for row in begins])
    packed = _outputs(model, ids, **arguments_of(model, positions))
    alone = _outputs(model, first)
    errors = [
        (packed[row, start : start + size] - alone[index, :size]).abs().max()
        for index, (row, start, size) in enumerate(places)
    ]
    error = torch.stack(errors).max() / alone.abs().max()
    return float(error) if bool(error.isfinite()) else float("inf")


def _starts(sizes: tuple[int, ...]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


def _outputs(model: nn.Module, ids: Tensor, **more: Any) -> Tensor:
    """Logits (batch, seq, ids)."""
    with _FirstOfEqual(), _in_float64():
        out: Tensor = model(input_ids=ids, use_cache=False, **more).logits
    return out


@contextmanager
def _in_float64() -> Iterator[None]:
    """Make new tensors float64: the smallest number of the weights' type, with which XGLM masks
    scores, does not fit into float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _FirstOfEqual(TorchFunctionMode):
    """Let `topk` choose the first of equal values.

    The scores of tokens in sparse attention are sums of ReLUs, so that several tokens of a document
    may have the score 0. Which of them `topk` chooses depends on the length of the row, and would
    look like an influence of other documents.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_topk if func in (torch.topk, Tensor.topk) else func)(*args, **(kwargs or {}))


def _topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, places = input.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))
