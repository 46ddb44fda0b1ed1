"""Ring and Ulysses attention against full attention in float64: values, gradients, bytes on the
wire, memory."""

import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import parity
import pytest
import torch
import torch.distributed as dist
from counting import recording
from memory import LiveBytes
from ranks import run_ranks
from reference import Recipe, data
from torch import Tensor

from lightning_3d.compat import torch as torch_compat
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.context import kernels, operators
from lightning_3d.parallel.context.attention import KINDS
from lightning_3d.parallel.context.checks import _replace
from lightning_3d.parallel.context.group import ContextParallel
from lightning_3d.parallel.context.kernels import Scores
from lightning_3d.parallel.context.masks import Mask
from lightning_3d.parallel.context.zigzag import natural_order, positions

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
        shapes = [
            (self.heads, 8),
            (self.key_heads, 8),
            (self.key_heads, self.value_width),
            (self.heads, self.value_width),
        ]
        made = [
            torch.randn(self.batch, h, self.length, w, generator=generator, dtype=torch.float64)
            for h, w in shapes
        ]
        return [
            x.to(self.dtype)
            for x in (*made, torch.randn(self.heads, generator=generator, dtype=torch.float64))
        ]


def full_attention(case: Case) -> list[Tensor]:
    """The result and the gradients of queries, keys, values and sinks, by autograd from the
    definition."""
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
    # the other one keeps empty rows finite
    scores = torch.cat([scores, extra if case.sinks else torch.full_like(extra, -1e30)], -1)
    weights = scores.softmax(-1)[..., :-1]
    out = weights @ value.repeat_interleave(group, 1)
    out.backward(grad)
    return [out.detach(), *(x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves)]


def attention_on_rank(case: Case, kind: str) -> tuple[list[Tensor], dict[str, int]]:
    """This rank's part of the same, and the bytes that it sent forward and backward."""
    context = ContextParallel(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), kind)
    order = positions(case.length, context.size, context.rank)
    query, key, value, grad = (x[:, :, order] for x in case.tensors()[:4])
    leaves = [x.detach().requires_grad_() for x in (query, key, value, case.tensors()[4])]
    mask = Mask(context, case.length, case.documents(), case.padding(), case.window)
    with recording() as forward:
        out = KINDS[kind](
            *leaves[:3], mask, Scores(0.3, case.softcap), leaves[3] if case.sinks else None
        )
    with recording() as backward:
        out.backward(grad)
    recorded = {"forward": forward, "backward": backward}
    sent = {
        name: sum(call.bytes for call in seen.calls if call.name != "irecv")
        for name, seen in recorded.items()
    }
    return [
        out.detach(),
        *(x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves),
    ], sent


def put_together(parts: list[list[Tensor]], case: Case) -> list[Tensor]:
    order = natural_order(case.length, len(parts))
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
    "everything at once": Case(
        starts=(9, 21), padded=5, window=7, softcap=2.0, sinks=True, value_width=5
    ),
}


def cases_on_rank(kind: str) -> list[list[Tensor]]:
    return [attention_on_rank(case, kind)[0] for case in CASES.values()]


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("size", [2, 4])
def test_values_and_gradients_are_those_of_full_attention(size: int, kind: str) -> None:
    assert_full_attention(run_ranks(cases_on_rank, size, kind), CASES)


def assert_full_attention(results: list[list[list[Tensor]]], cases: dict[str, Case]) -> None:
    for index, (name, case) in enumerate(cases.items()):
        found = put_together([parts[index] for parts in results], case)
        for what, got, expected in zip(
            ("out", "query", "key", "value", "sinks"), found, full_attention(case), strict=True
        ):
            error = (got.double() - expected).abs().max().item()
            assert error < TOLERANCE, f"{name}: {what}: {error:.1e}"


def compiled_on_rank(kind: str, names: list[str], backend: str) -> list[list[Tensor]]:
    """As one graph of the forward and one of the backward: a break is an error."""
    found = []
    for name in names:
        torch._dynamo.reset()
        compiled = torch.compile(KINDS[kind], backend=backend, fullgraph=True)
        with patch.dict(KINDS, {kind: compiled}):
            found.append(attention_on_rank(CASES[name], kind)[0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "names", "backend"),
    [
        *((kind, ["everything at once"], "aot_eager") for kind in KINDS),
        *(
            pytest.param(kind, list(CASES), backend, marks=pytest.mark.full)
            for kind in KINDS
            for backend in ("aot_eager", "inductor")
        ),
    ],
    ids=[
        *KINDS,
        *(f"{kind}-{backend}-all" for kind in KINDS for backend in ("aot_eager", "inductor")),
    ],
)
def test_compiled_values_and_gradients_are_those_of_full_attention(
    kind: str, names: list[str], backend: str
) -> None:
    assert_full_attention(
        run_ranks(compiled_on_rank, 2, kind, names, backend, timeout=500),
        {name: CASES[name] for name in names},
    )


def looks_at_documents() -> tuple[int, int]:
    """How often three compiled attentions with one batch look at its documents, and one that is not
    compiled."""
    case = CASES["documents"]
    context = ContextParallel(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    order = positions(case.length, context.size, context.rank)
    query, key, value, _ = (x[:, :, order] for x in case.tensors()[:4])
    counts = []
    compiled = torch.compile(KINDS["ring"], backend="aot_eager", fullgraph=True)
    for attend, times in ((compiled, 3), (KINDS["ring"], 1)):
        mask = Mask(context, case.length, case.documents())
        with patch.object(
            Mask, "_find_cover", autospec=True, side_effect=Mask._find_cover
        ) as looked:
            for _ in range(times):
                leaf = query.detach().requires_grad_()
                attend(leaf, key, value, mask, Scores(0.3)).sum().backward()
        counts.append(looked.call_count)
    return counts[0], counts[1]


def test_documents_are_looked_at_once_for_all_compiled_layers() -> None:
    for compiled, once in run_ranks(looks_at_documents, 2):
        assert compiled == once > 0


class KeepsMasks(parity.Module):
    """Counts the masks that compiled attention keeps at the begin of each step, after it, and makes
    some in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept = [*vars(self).get("kept", []), operators.known_masks()]
        documents = [torch.zeros(1, 4, dtype=torch.long) for _ in range(20)]
        for one in documents:
            operators._mask(one, None, 4, None, dist.group.WORLD.group_name)
        self.kept.append(operators.known_masks())
        if batch_idx == 1:
            raise ValueError("a step that fails")
        return super().training_step(batch, batch_idx)


def masks_kept() -> list[int]:
    operators.forget_masks()  # of other tests on this rank
    recipe = Recipe(steps=2)
    module = KeepsMasks(recipe)
    with pytest.raises(ValueError, match="a step that fails"):
        parity.fit_on_rank(
            recipe,
            parity.Rows(data(recipe)),
            module,
            layout="dp1",
            micro_batch_size=recipe.global_batch,
        )
    return [*module.kept, operators.known_masks()]


def test_masks_of_compiled_layers_live_as_long_as_their_step() -> None:
    """At most 16 in a step, none in the next one, and none after a fit, even if its last step
    failed."""
    assert run_ranks(masks_kept, 1) == [[0, 16, 0, 16, 0]]


def peak_on_rank(length: int) -> int:
    """Bytes of this rank's tensors at most, forward and backward, without the tiles of scores."""
    case = Case(length=length, batch=1, dtype=torch.float32)
    context = ContextParallel(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    part = [(4, 8), (2, 8), (2, 8)]
    with patch.object(kernels, "TILE_ELEMENTS", 2**10), LiveBytes() as live:
        leaves = [
            torch.randn(1, heads, length // context.size, width, requires_grad=True)
            for heads, width in part
        ]
        out = KINDS["ring"](*leaves, Mask(context, length), Scores(0.3, case.softcap))
        out.backward(torch.ones_like(out))
    return live.peak


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_equally_many_scores(size: int) -> None:
    """Causal attention: the token at position p has p + 1 scores."""
    assert len({int((positions(32, size, rank) + 1).sum()) for rank in range(size)}) == 1


@pytest.mark.full
def test_memory_grows_as_sequence_over_cp() -> None:
    """As many tokens a rank, as much memory, whatever the sequence; twice as many, twice as
    much."""
    by_part = {
        (size, part): max(run_ranks(peak_on_rank, size, size * part))
        for size, part in [(2, 128), (4, 128), (4, 256)]
    }
    # between two ranks there is one message less on its way
    assert by_part[4, 128] == pytest.approx(by_part[2, 128], rel=0.15)
    assert by_part[4, 256] == pytest.approx(2 * by_part[4, 128], rel=0.1)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_a_ring(size: int) -> None:
    """Forward 2 * (cp - 1) / cp of the bytes of all keys; backward the same and the gradients,
    which go all the way round."""
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


def fused_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )


def fused_backward_on_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **how: Any
) -> Any:
    assert grad.is_contiguous() and out.is_contiguous() and lse.is_contiguous()
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, query, key, value, out, lse, 0.0, how["causal"], scale=how["scale"])


def fused_cases_on_rank(names: tuple[str, ...]) -> list[tuple[list[Tensor], int]]:
    """With PyTorch's fused attention of the CPU in the place of CUDA's, and tiles of four tokens;
    and how often it was called."""
    calls: list[None] = []

    def fits(query: Tensor, value: Tensor, cover: Any, scores: Any) -> bool:
        return cover in (kernels.Cover.EVERYTHING, kernels.Cover.CAUSAL)

    def fused(*args: Any, **how: Any) -> tuple[Tensor, Tensor]:
        calls.append(None)
        return fused_on_cpu(*args, **how)

    changes = {
        "_fused": fits,
        "flash_attention": fused,
        "flash_attention_backward": fused_backward_on_cpu,
        "LARGEST_TILE": 4,
    }
    found = []
    with patch.multiple(kernels, **changes):
        for name in names:
            calls.clear()
            found.append(
                (attention_on_rank(replace(CASES[name], key_heads=4), "ring")[0], len(calls))
            )
    return found


def test_blocks_of_fused_attention_add_up() -> None:
    """Where only a part of a block counts too, as far as its parts count as a whole."""
    names = ("plain", "documents", "window", "padding", "wide keys")
    results = run_ranks(fused_cases_on_rank, 2, names)
    for index, name in enumerate(names):
        case = replace(CASES[name], key_heads=4)
        found = put_together([parts[index][0] for parts in results], case)
        for got, expected in zip(found, full_attention(case), strict=True):
            assert (got.double() - expected).abs().max() < TOLERANCE
        # no whole block has a window, and few have documents or padding
        assert all(parts[index][1] > 0 for parts in results), name
    # of eight blocks of chunks, those in the past
    assert [parts[0][1] for parts in results] == [5, 5]


def test_the_operators_of_cuda_take_what_they_are_given() -> None:
    """There is no such device here: on meta they check their arguments and say what they would
    return."""
    query, key = (
        torch.zeros(2, heads, 16, 8, device="meta", dtype=torch.bfloat16) for heads in (4, 2)
    )
    out, lse = torch_compat.flash_attention(query, key, key, causal=True, scale=0.5)
    assert (out.shape, lse.shape, lse.dtype) == (query.shape, query.shape[:3], torch.float32)
    found = torch_compat.flash_attention_backward(
        query, query, key, key, out, lse, causal=True, scale=0.5
    )
    assert [gradient.shape for gradient in found] == [query.shape, key.shape, key.shape]


class Hopper(torch.nn.Module):
    """What a model is asked for that wants FlashAttention 3."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="flash_attention_3")

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name


def test_missing_kernels_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            "attn_implementation=flash_attention_3 needs the package"
            " flash_attn_interface.*Install it"
        ),
    ):
        _replace(Hopper())
    assert torch_compat.flash_kernels() == "FA2"


def test_the_kernels_that_a_model_asks_for_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of this name, which registers its operators as FlashAttention 3 does."""
    operators = torch.library.Library("flash_attn_3", "DEF")
    for name in ("fwd", "bwd"):
        operators.define(f"{name}(Tensor q) -> Tensor")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    try:
        assert _replace(Hopper())
        assert torch_compat.flash_kernels() == "FA3"
        assert torch.nn.attention.current_flash_attention_impl() == "FA3"
    finally:
        torch_compat.use_flash_kernels("FA2")
    assert torch_compat.flash_kernels() == "FA2"


def test_other_kernels_only_where_they_run() -> None:
    ours = [
        (capability, width)
        for capability in ((8, 0), (9, 0), (10, 0), (12, 0))
        for width in (64, 256)
    ]
    assert [place for place in ours if kernels.flash_trains_on(*place, "FA3")] == [
        ((9, 0), 64),
        ((9, 0), 256),
    ]
    assert [place for place in ours if kernels.flash_trains_on(*place, "FA4")] == [
        ((9, 0), 64),
        ((10, 0), 64),
    ]


def test_flash_attention_only_where_it_has_a_backward() -> None:
    """torch 2.13, sdp_utils.cpp: compute capability 8.0 to 12.1; no head sizes of 193 to 224 where
    there is less shared memory."""
    for capability in ((8, 0), (9, 0), (10, 0)):
        assert kernels.flash_trains_on(capability, 64) and kernels.flash_trains_on(capability, 200)
    for capability in ((8, 6), (8, 9), (12, 0), (12, 1)):
        found = [kernels.flash_trains_on(capability, size) for size in (64, 192, 200, 224, 256)]
        assert found == [True, True, False, False, True]
    for capability in ((7, 5), (6, 1), (13, 0)):
        assert not kernels.flash_trains_on(capability, 64)
