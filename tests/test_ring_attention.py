"""Ring and Ulysses attention against full attention in float64: values, gradients, bytes on the wire, memory."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from counting import recording
from ranks import run_ranks
from torch import Tensor

from lightning_3d.context_parallel.attention import KINDS
from lightning_3d.context_parallel.context import ContextParallel
from lightning_3d.context_parallel.kernels import Scores
from lightning_3d.context_parallel.masks import Mask
from lightning_3d.context_parallel.zigzag import natural_order, positions

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    """One attention. Documents begin at ``starts``; the last tokens of row 1 are ``padded``."""

    length: int = 32
    heads: int = 4
    key_heads: int = 2
    batch: int = 2
    starts: tuple[int, ...] = ()
    padded: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    value_width: int = 8
    dtype: torch.dtype = torch.float64

    def documents(self) -> Tensor | None:
        if not self.starts:
            return None
        begins = torch.zeros(self.batch, self.length, dtype=torch.long)
        begins[0, list(self.starts)] = 1  # the other rows are one document
        return begins.cumsum(1)

    def padding(self) -> Tensor | None:
        kept = torch.ones(self.batch, self.length, dtype=torch.bool)
        kept[-1, self.length - self.padded :] = False
        return kept if self.padded else None

    def tensors(self) -> list[Tensor]:
        """Queries, keys, values, the gradient of the result, sinks."""
        generator = torch.Generator().manual_seed(0)
        shapes = [(self.heads, 8), (self.key_heads, 8), (self.key_heads, self.value_width), (self.heads, self.value_width)]
        made = [torch.randn(self.batch, h, self.length, w, generator=generator, dtype=torch.float64) for h, w in shapes]
        return [x.to(self.dtype) for x in (*made, torch.randn(self.heads, generator=generator, dtype=torch.float64))]


def full_attention(case: Case) -> list[Tensor]:
    """The result and the gradients of queries, keys, values and sinks, by autograd from the definition."""
    query, key, value, grad, sinks = (x.double() for x in case.tensors())
    leaves = [x.requires_grad_() for x in (query, key, value, sinks)]
    group = case.heads // case.key_heads
    scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * 0.3
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    place = torch.arange(case.length)
    seen = (place[:, None] >= place)[None]
    if case.window is not None:
        seen = seen & (place[:, None] - place < case.window)
    if (documents := case.documents()) is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])
    if (padding := case.padding()) is not None:
        seen = seen & padding[:, None]
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    extra = sinks.view(1, -1, 1, 1).expand(case.batch, -1, case.length, 1)
    scores = torch.cat([scores, extra if case.sinks else torch.full_like(extra, -1e30)], -1)  # the other one keeps empty rows finite
    weights = scores.softmax(-1)[..., :-1]
    out = weights @ value.repeat_interleave(group, 1)
    out.backward(grad)
    return [out.detach(), *(x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves)]


def attention_on_rank(case: Case, kind: str) -> tuple[list[Tensor], dict[str, int]]:
    """This rank's part of the same, and the bytes that it sent forward and backward."""
    context = ContextParallel(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), kind)
    order = torch.tensor(positions(case.length, context.size, context.rank))
    query, key, value, grad = (x[:, :, order] for x in case.tensors()[:4])
    leaves = [x.detach().requires_grad_() for x in (query, key, value, case.tensors()[4])]
    mask = Mask(context, case.length, case.documents(), case.padding(), case.window)
    with recording() as forward:
        out = KINDS[kind](*leaves[:3], mask, Scores(0.3, case.softcap), leaves[3] if case.sinks else None)
    with recording() as backward:
        out.backward(grad)
    sent = {name: sum(call.bytes for call in seen.calls if call.name != "irecv") for name, seen in (("forward", forward), ("backward", backward))}
    return [out.detach(), *(x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves)], sent


def put_together(parts: list[list[Tensor]], case: Case) -> list[Tensor]:
    order = torch.tensor(natural_order(case.length, len(parts)))
    whole = [torch.cat([part[index] for part in parts], 2)[:, :, order] for index in range(4)]
    return [*whole, torch.stack([part[4] for part in parts]).sum(0)]


CASES = {
    "plain": Case(),
    "one head for all keys": Case(key_heads=1, batch=1),
    "three groups": Case(heads=12, key_heads=6),
    "documents": Case(starts=(3, 4, 17, 30)),
    "a document over all ranks": Case(starts=(1, 31)),
    "padding": Case(padded=13, batch=3),
    "window": Case(window=5),
    "window and documents": Case(window=7, starts=(9, 21)),
    "softcap": Case(softcap=2.0),
    "sinks": Case(sinks=True, window=6),
    "wide keys": Case(value_width=5),
    "two tokens a rank": Case(length=8, window=3),
}


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_values_and_gradients_are_those_of_full_attention(name: str, size: int, kind: str) -> None:
    case = CASES[name]
    results = run_ranks(attention_on_rank, size, case, kind)
    found = put_together([tensors for tensors, _ in results], case)
    for what, got, expected in zip(("out", "query", "key", "value", "sinks"), found, full_attention(case), strict=True):
        error = (got.double() - expected).abs().max().item()
        assert error < TOLERANCE, f"{what}: {error:.1e}"


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_a_ring(size: int) -> None:
    """Forward 2 * (cp - 1) / cp of the bytes of all keys; backward the same and the gradients, which go all the way round."""
    case = Case(dtype=torch.float32)
    keys = case.batch * case.key_heads * case.length * 8 * 4
    for _, sent in run_ranks(attention_on_rank, size, case, "ring"):
        assert sent["forward"] == 2 * (size - 1) * keys // size
        assert sent["backward"] == 2 * (size - 1) * keys // size + 2 * keys


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_ulysses(size: int) -> None:
    """Queries, keys, values and the result once each way; of that 1 / cp stays on the rank."""
    case = Case(dtype=torch.float32, key_heads=4)
    part = case.batch * case.heads * case.length * 8 * 4 // size
    for _, sent in run_ranks(attention_on_rank, size, case, "ulysses"):
        assert sent == {"forward": 4 * part, "backward": 4 * part}
