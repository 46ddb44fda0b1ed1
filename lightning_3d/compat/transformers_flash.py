"""What FlashAttention of Transformers asks about masks and positions in each layer, and the lengths
of documents that it takes.

Three functions of `transformers.modeling_flash_attention_utils`, which are not public, read values
from the device: where padding is, and whether one row has several documents, and where they begin.
Tried with Transformers 5.17, 5.23 and 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Values = Callable[[Tensor], Tensor | None]


def answer_flash_attention(values_of: Values) -> Callable[[], None]:
    """Let FlashAttention of Transformers use values that the host knows, instead of waiting for the
    device. Returns what undoes this.

    Args:
        values_of: returns the values of a tensor, in host memory; None if it does not know them.
    """
    import transformers.modeling_flash_attention_utils as flash

    originals = {name: getattr(flash, name) for name in _ANSWERS if hasattr(flash, name)}
    for name, original in originals.items():
        setattr(flash, name, _answered(original, _ANSWERS[name], values_of))

    def undo() -> None:
        for name, original in originals.items():
            setattr(flash, name, original)

    return undo


def _answered(
    original: Callable[..., Any], answer: Callable[..., Any], values_of: Values
) -> Callable[..., Any]:
    def call(tensor: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if tensor is None or torch.compiler.is_compiling() or (values := values_of(tensor)) is None:
            return original(tensor, *args, **kwargs)
        return answer(original, tensor, values, *args, **kwargs)

    return call


def _unpadding(original: Any, mask: Tensor, values: Tensor) -> tuple[Tensor, Tensor, int]:
    """(places of tokens in the flattened mask, begins of rows among them and the end of the last
    one, length of the longest row)."""
    on_host, _, longest = _computed_on_host(original, values)
    places = torch.nonzero_static(mask.flatten(), size=len(on_host)).flatten()
    begins = F.pad(
        torch.cumsum(mask.sum(dim=-1, dtype=torch.int32), dim=0, dtype=torch.int32), (1, 0)
    )
    return places, begins, longest


def _is_packed(original: Any, positions: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> bool:
    return bool(_computed_on_host(original, values, *args, **kwargs))


def _documents(
    original: Any, positions: Tensor, values: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Twice, for queries and keys: begins of the documents of a row and the end of the last one,
    and the length of the longest."""
    (on_host, _), (longest, _) = _computed_on_host(original, values)
    flat = positions.reshape(-1)
    begins = torch.nonzero_static(flat == flat.min(), size=len(on_host) - 1).flatten()
    ends = F.pad(begins.to(torch.int32), (0, 1), value=len(flat))
    return (ends, ends), (longest, longest)


def _computed_on_host(original: Any, values: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The original's results, in which single numbers are Python's."""

    def plain(result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(map(plain, result))
        return result.item() if isinstance(result, Tensor) and result.ndim == 0 else result

    return plain(original(values, *args, **kwargs))


_ANSWERS: dict[str, Callable[..., Any]] = {
    "_get_unpad_data": _unpadding,
    "_is_packed_sequence": _is_packed,
    "prepare_fa_kwargs_from_position_ids": _documents,
}


def document_lengths(positions: Tensor) -> dict[str, Any]:
    """Arguments of a model's forward with which FlashAttention's variable-length kernels keep
    documents apart, in any number of rows.

    Transformers itself looks for documents in micro-batches of one row only. The number of
    documents is the one value that the host has to know: it is read once for all layers, and not
    from the device where the host knows the batch (`KnownValues`). The bound of the lengths is the
    length of a row.

    Args:
        positions: (rows, seq) of int64; a document begins with each row and where a position does
            not follow the one before it.
    """
    first = torch.ones_like(positions[:, :1], dtype=torch.bool)
    begins = torch.cat([first, positions.diff(dim=1) != 1], dim=1).flatten()
    places = torch.nonzero_static(begins, size=int(begins.sum())).flatten()
    ends = F.pad(places.to(torch.int32), (0, 1), value=len(begins))
    longest = positions.shape[1]
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


@contextmanager
def replaced_kernels(rows: Callable[..., Tensor], lengths: Callable[..., Tensor]) -> Iterator[None]:
    """Context in which every FlashAttention of Transformers calls these functions instead of its
    kernels.

    Args:
        rows: instead of `flash_attn_func`.
        lengths: instead of `flash_attn_varlen_func`.
    """
    import transformers.modeling_flash_attention_utils as flash

    before = dict(vars(flash))  # kernels that are loaded already
    functions = (rows, lengths, None, flash._pad_input, flash._unpad_input)
    changed: Any = flash
    changed._lazy_imports, changed._loaded_implementation = lambda *args, **kwargs: functions, None
    try:
        yield
    finally:
        vars(flash).update(before)
