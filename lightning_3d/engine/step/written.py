"""What a step writes, which one process writes once per batch of all rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.engine.step.loss_finding import at_once
from lightning_3d.errors import listed, plural
from lightning_3d.layout.layout import Layout

_SAMPLE = 1024


class ParameterWrites:
    """Parameters that the step changes: again in each call, such as a moving average of weights, or
    in its first one only.

    Looks at some elements of each parameter, because writes through `data` are not counted.

    Args:
        wanted: whether to look.

    Attributes:
        again: names of the parameters that the second call has changed again.
        once: the values of the others after the first call.
    """

    def __init__(self, root: nn.Module, *, wanted: bool) -> None:
        self._root, self._wanted = root, wanted
        self._changed: dict[str, Tensor] = {}
        self._initial: dict[str, Tensor] = {}
        self.once: dict[str, Tensor] = {}
        self.again: list[str] = []

    @property
    def writes(self) -> bool:
        """Whether the first call has changed any."""
        return bool(self._changed)

    @contextmanager
    def watching(self, index: int) -> Iterator[None]:
        """Context of a call of the step on a micro-batch, once for each stage of this rank. The
        first two are compared."""
        if not self._wanted or index > 1:
            yield
            return
        before = self._samples()
        yield
        after = self._samples()
        if index == 0:
            changed = {
                name: sample != after[name]
                for name, sample in before.items()
                if not torch.equal(sample, after[name])
            }
            self._changed |= changed
            self._initial |= {name: before[name] for name in changed}
            self.once |= {name: after[name] for name in changed}
            return
        again = [
            name
            for name, elements in self._changed.items()
            if _moved(before[name][elements], after[name][elements])
        ]
        self.again += again
        for name in again:
            self.once.pop(name, None)

    @contextmanager
    def first_again(self) -> Iterator[list[str]]:
        """Context of another first call, which gives the names of the parameters that it sets to
        other values. Small ones have the values from before the first call, because the step may
        look at them."""
        differing: list[str] = []
        kept = self._samples()
        self._put(self._initial)
        try:
            yield differing
        finally:
            now = self._samples()
            differing += [name for name in self.once if self._differs(name, now[name])]
            self._put(kept)

    def _differs(self, name: str, now: Tensor) -> bool:
        """Whether elements that the first call has written have other values: neither what it
        wrote, nor what was there before."""
        elements = self._changed[name]
        now, wrote, before = now[elements], self.once[name][elements], self._initial[name][elements]
        return _moved(torch.where(now == before, wrote, now), wrote)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name in self.once:
            parameter = self._root.get_parameter(name)
            if parameter.numel() == values[name].numel():
                parameter.detach().copy_(values[name].view(parameter.shape))

    def _samples(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self._root.named_parameters():
            flat = parameter.detach().flatten()
            found[name] = flat[:: max(1, flat.numel() // _SAMPLE)].clone()
        return found


def _moved(before: Tensor, after: Tensor) -> bool:
    """Return whether numbers changed by more than rounding."""
    rounding = 4 * torch.finfo(before.dtype).eps if before.is_floating_point() else 0.0
    return not torch.allclose(before, after, rtol=rounding, atol=0.0, equal_nan=True)


def digests(written: dict[str, Any]) -> dict[str, str]:
    """Describe values so that equal ones have equal descriptions."""
    return {name: _digest(value) for name, value in written.items()}


def _digest(value: Any) -> str:
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return f"{tuple(value.shape)} {hashlib.sha256(numbers.tobytes()).hexdigest()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_digest, value))}]"
    return (
        repr(value)
        if isinstance(value, (bool, int, float, complex, str, bytes, type(None)))
        else type(value).__name__
    )


def accumulated_numbers(changed: dict[str, Any]) -> list[str]:
    """Names of the numbers among the attributes of the user's modules that a call has changed."""
    return [
        name
        for name, value in changed.items()
        if name.startswith("self.") and type(value) in (int, float)
    ]


def state_refusal(
    names: list[str], losses: tuple[float, float], layout: Layout, micro_batches: int, rows: int
) -> str:
    """Explain why a loss that depends on what the step wrote is not trained as one process trains
    it, and what works.

    Args:
        losses: of the same rows, in two calls.
        micro_batches: of each data-parallel rank.
        rows: of a micro-batch.
    """
    return (
        f"The loss of training_step depends on what the step itself writes ({_named(names)}): the"
        f" same rows have the loss {losses[0]:.6g} in one call and {losses[1]:.6g} in the next."
        f" {_calls(layout, micro_batches, rows)}, so this would train another loss."
        f" {_instead('it', layout, micro_batches, rows)}"
    )


def weight_refusal(names: list[str], layout: Layout, micro_batches: int, rows: int) -> str:
    """Explain why parameters that each call of the step changes are not those of one process, and
    what works."""
    return (
        f"Each call of training_step changes parameters ({_named(list(dict.fromkeys(names)))})."
        f" {_calls(layout, micro_batches, rows)}, so they would not be the same."
        f" {_instead('them', layout, micro_batches, rows)}"
    )


def first_rows_refusal(names: list[str], layout: Layout, micro_batches: int, rows: int) -> str:
    """Explain why parameters whose first values depend on the rows of the first call are not those
    of one process, and what works."""
    total = layout.dp * micro_batches * rows
    return (
        "The first call of training_step sets parameters from its rows"
        f" ({_named(list(dict.fromkeys(names)))}): other rows give other values."
        f" {_calls(layout, micro_batches, rows)}, so training would not begin with the same values."
        f" Set them before trainer.fit (run the model on {plural(total, 'row')} in training mode),"
        f" or use {at_once(layout, total)}, which computes the global batch at once. Or pass"
        ' loss_reduction="accumulate" to train with the values of a part. See'
        " docs/your_model.md."
    )


def _named(names: list[str]) -> str:
    outermost = sorted(names, key=lambda name: name.count("."))
    more = [f"{len(names) - 4} others"] if len(names) > 5 else outermost[4:]
    return listed([*outermost[:4], *more])


def _calls(layout: Layout, micro_batches: int, rows: int) -> str:
    total = plural(layout.dp * micro_batches * rows, "row")
    often = f"{micro_batches} times" if micro_batches > 1 else "once"
    ranks = " on each data-parallel rank" if layout.dp > 1 else ""
    return (
        f"One process calls it once for a batch, with {total}; this layout calls it {often}{ranks},"
        f" with {plural(rows, 'row')}"
    )


def _instead(what: str, layout: Layout, micro_batches: int, rows: int) -> str:
    return (
        f"Write {what} in on_train_batch_end, or use"
        f" {at_once(layout, layout.dp * micro_batches * rows)}, which computes the global batch at"
        ' once. Or pass loss_reduction="accumulate" to train with what the calls write. See'
        " docs/your_model.md."
    )
