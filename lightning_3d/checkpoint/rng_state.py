"""Random number generators of a rank, as one row of a tensor of all ranks.

Ranks that see the same data share a row, because their generators have the same state. Dropout does
not need these states: its streams depend on the step.
"""

from __future__ import annotations

import base64
import json
import random
from typing import Any, cast

import numpy
import torch
from torch import Tensor

GENERATORS = "generators"
_ROW_BYTES = 32 * 1024


def read_generators(device: torch.device) -> Tensor:
    """Read the generators of torch (host and device), numpy and Python, as bytes."""
    kind, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    state = {
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
        "numpy": [kind, keys.tolist(), *rest],
        "python": random.getstate(),
    }
    return torch.frombuffer(
        bytearray(json.dumps(state).encode().ljust(_ROW_BYTES)), dtype=torch.uint8
    )


def set_generators(row: Tensor, device: torch.device) -> None:
    """Restore what `read_generators` read. Generators that were not saved stay as they are."""
    state = json.loads(bytes(row.tolist()))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
