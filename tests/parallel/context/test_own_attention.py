"""Attention of the user's own, and packed documents, give with context parallelism what one process
gives."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers.models.llama.modeling_llama as llama
from ranks import run_ranks
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightning_3d.compat.transformers_attention import own_attention
from lightning_3d.engine.step.loss_weights import LossWeights, weigh_loss
from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.parallel.blocks import find_blocks
from lightning_3d.parallel.context import ContextParallel, share_sequences
from lightning_3d.parallel.context.attention import NAME, register

SEQUENCE, VOCABULARY = 16, 61
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def softened(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention with half the scale, under a name of the user's own or under that of sdpa."""
    kwargs["scaling"] /= 2
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[return-value]


@functools.wraps(sdpa_attention_forward)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    """A wrapper that carries the name of the function that it wraps."""
    out, weights = sdpa_attention_forward(*args, **kwargs)
    return out * 2, weights


def halved(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A kernel in the place of torch's."""
    return torch.ops.aten.scaled_dot_product_attention(query / 2, *args, **kwargs)


def banded(*args: Any, **kwargs: Any) -> Tensor:
    """A mask that hides every fourth token."""
    mask = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    there = torch.arange(mask.shape[-1]) % 4 < 3
    return mask & (there | torch.eye(mask.shape[-1], dtype=torch.bool))


class PlainAttention(llama.LlamaAttention):
    """Attends without the interface."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            layer(hidden_states).view(shape).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend: Any = torch.ops.aten.scaled_dot_product_attention
        out = attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class MixingMLP(llama.LlamaMLP):
    """Reads the token before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def all_ways(model: Any) -> None:
    for attention in attentions(model):
        attention.is_causal = False


def one_way_back(model: Any) -> None:
    attentions(model)[1].is_causal = False


def one_plain(model: Any) -> None:
    attentions(model)[1].__class__ = PlainAttention


def mixing_mlp(model: Any) -> None:
    model.model.layers[1].mlp.__class__ = MixingMLP


def nothing(model: Any) -> None:
    pass


KINDS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "of its own name": ("softened", nothing),
    "under the name sdpa": ("sdpa registered", nothing),
    "wrapped": ("sdpa wrapped", nothing),
    "kernel of torch": ("sdpa kernel", nothing),
    "masks": ("sdpa masks", nothing),
    "eager": ("eager replaced", nothing),
    "both directions": ("sdpa", all_ways),
    "both directions in one layer": ("sdpa", one_way_back),
    "without the interface": ("sdpa", one_plain),
    "tokens mixed elsewhere": ("sdpa", mixing_mlp),
}


@contextmanager
def changed(how: str) -> Iterator[None]:
    """Change what Transformers or torch attends with."""
    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    with ExitStack() as stack:
        stack.enter_context(patch.dict(functions))
        stack.enter_context(patch.dict(masks))
        AttentionInterface.register("softened", softened)
        AttentionMaskInterface.register("softened", sdpa_mask)
        if how.endswith("registered"):
            AttentionInterface.register("sdpa", softened)
        if how.endswith("wrapped"):
            AttentionInterface.register("sdpa", wrapped)
        if how.endswith("masks"):
            AttentionMaskInterface.register("sdpa", banded)
        if how.endswith("kernel"):
            stack.enter_context(patch.object(F, "scaled_dot_product_attention", halved))
        if how.endswith("replaced"):
            stack.enter_context(patch.object(llama, "eager_attention_forward", softened))
        yield


def build(implementation: str = "sdpa", **more: Any) -> Any:
    """A tiny model in float64."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes | {"max_position_embeddings": 64} | more)
    model = LlamaForCausalLM._from_config(
        config, dtype=torch.float64, attn_implementation=implementation
    )
    for parameter in model.parameters():  # away from ones and zeros
        nn.init.normal_(parameter, std=0.2)
    return model.train()


def share(model: nn.Module, kind: str) -> bool:
    """Do what `assembly` does with the whole model on a rank. Returns whether our attention has
    replaced the model's."""
    context = ContextParallel(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), kind)
    split = share_sequences(model, find_blocks(model, ParallelPlan({})), "", context)
    if split is not None:
        split.gather_inside()
        split.split_outside(model)
        split.split_head(model)
    weigh_loss(model, LossWeights(), context)
    return split is None


def difference(alone: Any, shared: Any, **call: Any) -> float:
    """The largest difference of the loss, and relative of gradients."""
    ids = torch.randint(3, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    logits = alone(input_ids=ids, **call).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss = shared(input_ids=ids, labels=ids, **call).loss
    expected.backward()
    (loss / dist.get_world_size()).backward()
    found = [(loss - expected).abs().item()]
    for a, b in zip(alone.parameters(), shared.parameters(), strict=True):
        part = torch.zeros_like(a) if b.grad is None else b.grad
        dist.all_reduce(part)
        found.append(((part - a.grad).norm() / a.grad.norm().clamp(min=1e-3)).item())
    return max(found)


def own_kinds() -> dict[str, tuple[float, bool]]:
    """(difference, whether ours replaced it) of each kind by ring and Ulysses; of a model without a
    change under ""."""
    found = {}
    for kind, (how, change) in {"": ("sdpa", nothing), **KINDS}.items():
        for way in ("ring", "ulysses"):
            with changed(how):
                alone, shared = build(how.split()[0]), build(how.split()[0])
                change(alone)
                change(shared)
                replaced = share(shared, way)
                before = found.get(kind, (0.0, replaced))[0]
                found[kind] = max(before, difference(alone, shared)), replaced
    return found


def test_an_attention_of_the_users_own_gives_what_it_gives_on_one_process() -> None:
    found = run_ranks(own_kinds, 2)[0]
    assert {kind: error for kind, (error, _) in found.items() if error > 1e-11} == {}
    assert [kind for kind, (_, replaced) in found.items() if replaced] == [""]


def packed() -> dict[str, float]:
    """Differences with positions that restart, with and without the cache that Transformers makes
    by default."""
    restarting = {"position_ids": torch.arange(SEQUENCE).remainder(6).expand(2, SEQUENCE)}
    calls = {"default": restarting, "without": restarting | {"use_cache": False}}
    options: dict[str, dict[str, Any]] = {
        "": {},
        "configured": {"use_cache": False},
        "split": {"rope_parameters": DYNAMIC, "max_position_embeddings": 8},
    }
    found = {}
    for option, more in options.items():
        for name, call in calls.items():
            alone, shared = build(**more), build(**more)
            share(shared, "ring")
            found[f"{option} {name}"] = difference(alone, shared, **call)
    with torch.no_grad():  # so that the test sees both
        model, ids = build(), torch.arange(SEQUENCE).expand(2, SEQUENCE)
        same = torch.allclose(
            model(input_ids=ids, **calls["default"]).logits,
            model(input_ids=ids, **calls["without"]).logits,
        )
    assert not same
    return found


def test_documents_are_kept_apart_only_where_one_process_does() -> None:
    found = run_ranks(packed, 2)[0]
    assert {
        name: error for name, error in found.items() if error > (1e-6 if "split" in name else 1e-11)
    } == {}


def not_causal() -> None:
    model = build()
    share(model, "ring")
    model(input_ids=torch.arange(SEQUENCE).unsqueeze(0), is_causal=False)


def turned_after_the_start() -> None:
    model = build()
    share(model, "ring")
    all_ways(model)
    model(input_ids=torch.arange(SEQUENCE).unsqueeze(0))


@pytest.mark.parametrize("call", [not_causal, turned_after_the_start])
def test_a_call_that_is_not_causal_is_refused_where_the_attention_is_replaced(
    call: Callable[[], None],
) -> None:
    with pytest.raises(PlanError, match="causal"):
        run_ranks(call, 1)


@pytest.mark.parametrize("kind", list(KINDS)[:-2])
def test_which_attention_is_the_users_own(kind: str) -> None:
    how, change = KINDS[kind]
    with changed(how):
        model = build(how.split()[0])
        change(model)
        assert own_attention(attentions(model)[1])


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention", NAME])
def test_which_attention_is_of_transformers(implementation: str) -> None:
    register()
    model = build()
    model.config._attn_implementation = implementation
    assert not any(map(own_attention, attentions(model)))
