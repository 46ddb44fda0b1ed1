"""A trial that shows whether a model keeps the documents of a packed sample apart when their positions restart.

A copy of the model runs on a few random tokens with random weights, in float64 on the CPU: once on samples of several documents, and once
on each document alone. Every result must be the same. Of large models, one block of each kind runs, and matrices are filled with one row,
which takes no memory. Windows are shorter than documents, and the kernels of FlashAttention are replaced (`document_kernels`). No rank
communicates, and the model may be on meta.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.compat.torch import real_values
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.context.token_trials import random_values
from lightning_3d.strategy.self_check.model_copy import copy_without_values, kept_blocks, kinds_of, leave_out_blocks
from lightning_3d.training.data.documents import restarting_positions
from lightning_3d.training.document_inputs import arguments_of
from lightning_3d.training.document_kernels import on_the_cpu
from lightning_3d.weights.blueprint import isolated_generators
from lightning_3d.weights.initialize import initialize

_DOCUMENTS = ((5, 4, 3), (2, 1, 9))
"""Tokens of the documents of each sample."""

_IDS = 64
"""Token ids of the copy: rows of its embeddings and of its head."""

_WINDOW = 3
"""Tokens of a window or of a chunk of attention in the copy."""

_SAME = 1e-6  # relative; some models compute parts in float32


def require_separate_documents(model: nn.Module) -> None:
    """Refuse a model whose results in a document of a packed sample differ from those of the document alone.

    Args:
        model: a whole causal LM of Transformers.

    Raises:
        ConfigError: names the model.
    """
    name = type(model).__name__
    works = "Use data.document_mask=false, or a model that attends with rotary positions and full or sliding attention, such as Llama."
    with real_values(), torch.device("cpu"), torch.no_grad(), isolated_generators(), on_the_cpu():
        try:
            difference = _largest_difference(_trial_copy(model))
        except Exception as error:
            said = " ".join(str(error).split())
            raise ConfigError(
                f"data.document_mask=true cannot be used with {name}: a trial on a few tokens with position_ids ended with"
                f" {type(error).__name__}: {said[:200].rstrip('.')}. {works}"
            ) from error
    if not difference <= _SAME:
        raise ConfigError(
            f"data.document_mask=true cannot be used with {name}: its results in a document depend on the other documents of the sample,"
            f" although positions restart (by {difference:.1e} in a trial on a few tokens). {works}"
        )


def _largest_difference(model: nn.Module) -> float:
    """Return the largest difference of outputs between packed documents and each document alone, relative to the largest output."""
    generator = torch.Generator().manual_seed(0)
    length = sum(_DOCUMENTS[0])
    ids = torch.randint(3, _IDS // 2, (len(_DOCUMENTS), length), generator=generator)
    begins = torch.zeros(ids.shape, dtype=torch.bool)
    begins[0, _starts(_DOCUMENTS[0])] = begins[1, _starts(_DOCUMENTS[1])] = True
    places = [(row, start, size) for row, sizes in enumerate(_DOCUMENTS) for start, size in zip(_starts(sizes), sizes, strict=True)]
    # The results of causal models do not depend on the tokens that follow.
    first = torch.stack([ids[row].roll(-start) for row, start, _ in places])
    positions = torch.stack([restarting_positions(row) for row in begins])
    packed = _outputs(model, ids, **arguments_of(model, positions))
    alone = _outputs(model, first)
    errors = [(packed[row, start : start + size] - alone[index, :size]).abs().max() for index, (row, start, size) in enumerate(places)]
    error = torch.stack(errors).max() / alone.abs().max()
    return float(error) if bool(error.isfinite()) else float("inf")


def _starts(sizes: tuple[int, ...]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


def _outputs(model: nn.Module, ids: Tensor, **more: Any) -> Tensor:
    """Logits (batch, seq, ids)."""
    with _OneRow(), _FirstOfEqual():
        out: Tensor = model(input_ids=ids, use_cache=False, **more).logits
    return out


class _OneRow(TorchFunctionMode):
    """Compute products with matrices whose rows are one row by that row alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) > 1 and args[1].ndim == 2 and args[1].stride(0) == 0:
            product = func(args[0], args[1][:1]).expand(*args[0].shape[:-1], len(args[1]))
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return product if bias is None else product + bias
        return func(*args, **(kwargs or {}))


class _FirstOfEqual(TorchFunctionMode):
    """Let `topk` choose the first of equal values.

    The scores of tokens in sparse attention are sums of ReLUs, so that several tokens of a document may have the score 0. Which of them
    `topk` chooses depends on the length of the row, and would look like an influence of other documents.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_topk if func in (torch.topk, Tensor.topk) else func)(*args, **(kwargs or {}))


def _topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, places = input.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))


def _trial_copy(model: nn.Module) -> Any:
    """Copy a model for the trial: random weights, one block of each kind, few token ids."""
    copied = copy_without_values(model)
    _leave_out_equal_blocks(copied)
    head = getattr(copied, "get_output_embeddings", lambda: None)()
    shared: dict[int, nn.Parameter] = {}
    for child in copied.modules():
        by_id = child is head or isinstance(child, nn.Embedding)
        if isinstance(child, nn.Embedding):
            child.padding_idx = None
        for key, value in child._parameters.items():
            if value is not None:
                given = random_values(value[:_IDS] if by_id else value)
                child._parameters[key] = shared.setdefault(id(value), nn.Parameter(given, value.requires_grad))
        if (config := vars(child).get("config")) is not None:
            config._experts_implementation = "eager"  # grouped products do not know float64
            _shorten_windows(config)
            if getattr(config, "_attn_implementation", None) == "flex_attention":  # same masks, but on the CPU it does not know sinks
                config._attn_implementation_internal = "eager"
        _shorten_windows(child)
    initialize(copied, device="cpu")  # buffers that are on meta
    return copied


def _shorten_windows(holder: Any) -> None:
    """Make windows, chunks, blocks and selections of attention shorter than the trial's documents: their edges must follow documents."""
    for name in ("sliding_window", "attention_chunk_size", "index_topk", "index_block_size", "block_size"):
        if isinstance(value := vars(holder).get(name), int) and value > _WINDOW:
            setattr(holder, name, _WINDOW)


def _leave_out_equal_blocks(copied: nn.Module) -> None:
    """Replace all blocks but the first and the last of each kind, in place; none where the model does not name its blocks."""
    try:
        plan = read_plan(copied)
    except PlanError:
        return
    if plan.layers:
        kept, _ = kept_blocks(kinds_of(list(copied.get_submodule(plan.layers).children())))
        leave_out_blocks(copied, plan, kept, {})
