"""Models that mix tokens by more than attention: between their blocks each context-parallel rank
has its part of the tokens."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import recording
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor, nn

from lightning_3d.engine.step.loss_weights import LossWeights, weigh_loss
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.parallel.blocks import find_blocks, process_blocks
from lightning_3d.parallel.context import (
    ContextParallel,
    WholeSequence,
    mixes_by_attention,
    share_sequences,
)
from lightning_3d.parallel.context.inputs import refuse_arguments
from lightning_3d.parallel.context.split_blocks import MixingTokens, SplitAttention, use_context
from lightning_3d.parallel.trials.tokens import mixing_tokens, treats_tokens_separately

SEQUENCE, VOCABULARY, WIDTH = 24, 61, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "use_cache": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {},
    "mamba": {},
    "qwen3_next": MIXTURE | LINEAR | HYBRID,
    "mpt": {"d_model": WIDTH, "n_heads": 4, "n_layers": 2},
    "falcon": {"alibi": True},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": MIXTURE | {"intermediate_size_mlp": 48, "attention_chunk_size": 8},
    "llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
}
# their states, norms, routers, positions
IN_FLOAT32 = ("qwen3_next", "mamba", "llama4_text", "lfm2", "llama")
RINGS = ("qwen3_next", "lfm2", "llama")


def build(family: str, **more: Any) -> nn.Module:
    """A tiny model in float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    # Falcon derives it
    sizes = {name: size for name, size in SIZES.items() if (family, name) != ("falcon", "head_dim")}
    config = AutoConfig.for_model(family, **sizes | FAMILIES[family] | more)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, experts_implementation="eager", attn_implementation="eager"
    )
    for parameter in model.parameters():  # away from ones and zeros
        nn.init.normal_(parameter, std=0.2)
    return model.train()


def batch(padding: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (2, SEQUENCE), generator=generator)
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.2, -100)
    there = torch.arange(SEQUENCE) < torch.tensor([[SEQUENCE], [17 if padding else SEQUENCE]])
    return {
        "input_ids": tokens * there,
        "labels": labels.masked_fill(~there, -100),
        "attention_mask": there.long(),
    }


def share(model: nn.Module, *, compiled: bool = False) -> None:
    """What `assembly` does with the whole model on a rank."""
    context = ContextParallel(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    blocks = find_blocks(model, ParallelPlan({}))
    split = share_sequences(model, blocks, "", context)
    assert split is not None
    split.gather_inside()
    process_blocks(blocks, BlockOptions(compile=compiled))
    split.split_outside(model)
    split.split_head(model)
    weigh_loss(model, LossWeights(), context)


def plain_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """In float64; that of Transformers is computed in float32."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    )


def differences(family: str, *, compiled: bool = False) -> list[float]:
    """(of losses, relative of gradients), without padding and with."""
    found = []
    for padding in (False, True):
        alone, shared, inputs = build(family), build(family), batch(padding)
        share(shared, compiled=compiled)
        expected = plain_loss(alone, inputs)
        output = shared(**inputs)
        assert isinstance(output.logits, WholeSequence) and output.logits.shape == (
            2,
            SEQUENCE,
            VOCABULARY,
        )
        found.append((output.loss - expected).abs().item())
        expected.backward()
        (output.loss / dist.get_world_size()).backward()
        for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
            gradient = torch.zeros_like(one) if one.grad is None else one.grad
            part = torch.zeros_like(gradient) if other.grad is None else other.grad
            dist.all_reduce(part)
            found.append(((part - gradient).norm() / gradient.norm().clamp(min=1e-3)).item())
    return found


def float32_noise(family: str) -> float:
    """Largest relative change of a gradient of one process when its weights are rounded to
    float32."""
    found = []
    for padding in (False, True):
        exact, rounded, inputs = build(family), build(family), batch(padding)
        with torch.no_grad():
            for parameter in rounded.parameters():
                parameter.copy_(parameter.float())
        for model in (exact, rounded):
            plain_loss(model, inputs).backward()
        pairs = [
            (one.grad, other.grad)
            for one, other in zip(exact.parameters(), rounded.parameters(), strict=True)
        ]
        found += [
            ((b - a).norm() / a.norm().clamp(min=1e-3)).item()
            for a, b in pairs
            if a is not None and b is not None
        ]
    return max(found)


@pytest.mark.parametrize("family", by_default(list(FAMILIES), 0, 1, 2, 7))
def test_losses_and_gradients_are_those_of_one_process(family: str) -> None:
    """What is computed in float32 depends on the processor, too, as much as rounding to float32
    changes it."""
    worst = max(max(found) for found in run_ranks(differences, 2, family))
    assert worst < (max(1e-5, 4 * float32_noise(family)) if family in IN_FLOAT32 else 1e-11)


def documents_in_one_row() -> list[float]:
    """(difference of losses, what the loss would change by without documents): the second row alone
    has two documents."""
    alone, shared, inputs = build("qwen3_next"), build("qwen3_next"), batch(False)
    del inputs["attention_mask"]
    positions = torch.arange(SEQUENCE).repeat(2, 1)
    with_documents = positions.clone()
    with_documents[1, 10:] -= 10
    share(shared)
    expected = alone(**inputs, position_ids=with_documents).loss
    return [
        abs(alone(**inputs, position_ids=positions).loss - expected).item(),
        abs(shared(**inputs, position_ids=with_documents).loss - expected).item(),
    ]


def test_documents_are_seen_in_whichever_row_they_are() -> None:
    for without, difference in run_ranks(documents_in_one_row, 2):
        assert difference < 1e-5 < 1e-3 < without


def compiled_differences(family: str) -> list[float]:
    """In blocks that must not break the graph."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
        )
        return differences(family, compiled=True)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["bloom", "lfm2"])
def test_compiled_losses_and_gradients_are_those_of_one_process(family: str) -> None:
    worst = max(max(found) for found in run_ranks(compiled_differences, 2, family, timeout=500))
    assert worst < (1e-5 if family in IN_FLOAT32 else 1e-11)


def kinds(family: str, **more: Any) -> tuple[set[str], set[str]]:
    """Names of the modules that gather the sequence, and of those in whose attention keys
    travel."""
    model = build(family, **more)
    share(model)
    of = [
        {type(child).__name__ for child in model.modules() if isinstance(child, kind)}
        for kind in (MixingTokens, SplitAttention)
    ]
    return of[0], of[1]


def test_plain_attention_next_to_other_layers_still_sends_keys_around() -> None:
    assert run_ranks(kinds, 1, "qwen3_next")[0] == (
        {"Qwen3NextGatedDeltaNet"},
        {"Qwen3NextAttention"},
    )
    assert run_ranks(kinds, 1, "llama")[0] == (set(), {"LlamaAttention"})
    assert run_ranks(kinds, 1, "bloom")[0] == ({"BloomAttention"}, set())


def test_an_attention_that_counts_the_tokens_it_gets_sees_all_of_them() -> None:
    """Llama 4 scales the queries of long sequences by their positions, which its attention counts
    by itself."""
    assert run_ranks(kinds, 1, "llama4_text", attention_chunk_size=None)[0] == (
        {"Llama4TextAttention"},
        set(),
    )


def refused() -> list[str]:
    """The messages of what cannot be right: logits that are changed in place, and a last block that
    does not run."""
    model = build("bloom")
    share(model)
    logits = model(**batch(False)).logits
    messages = []
    for change in (lambda: logits.float().__setitem__(..., 0.0), lambda: logits.clone().mul_(2.0)):
        with pytest.raises(PlanError) as error:
            change()
        messages.append(str(error.value))
    model.transformer.h = model.transformer.h[:-1]
    with pytest.raises(PlanError) as error:
        model(**batch(False))
    return [*messages, str(error.value)]


def test_what_would_be_lost_is_refused() -> None:
    *changed, last = run_ranks(refused, 2)[0]
    assert all("in place" in message and "masked_fill" in message for message in changed)
    assert "its last block did not run" in last


@pytest.mark.parametrize("name", ["cache", "cache_params", "state"])
def test_a_cache_is_refused_under_each_of_its_names(name: str) -> None:
    with pytest.raises(ConfigError, match=f"called with {name}, which"):
        refuse_arguments({name: object()})


def other_kind() -> bool:
    """Whether all parts of a model communicate as another Trainer wants it."""
    model = build("qwen3_next")
    share(model)
    other = ContextParallel(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), "ulysses")
    use_context(model, other)
    return all(
        part.context_split.context is other
        for part in model.modules()
        if hasattr(part, "context_split")
    )


def test_another_trainer_may_choose_another_kind() -> None:
    assert run_ranks(other_kind, 1)[0]


def recomputed() -> float:
    """Largest relative difference of a gradient of two forwards of different lengths, with blocks
    that are recomputed."""
    alone, shared, inputs = build("bloom"), build("bloom"), batch(False)
    share(shared)
    shared.gradient_checkpointing_enable()
    short = {key: value[:, : SEQUENCE // 2] for key, value in inputs.items()}
    (plain_loss(alone, inputs) + plain_loss(alone, short)).backward()
    ((shared(**inputs).loss + shared(**short).loss) / dist.get_world_size()).backward()
    worst = 0.0
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        dist.all_reduce(other.grad)
        worst = max(
            worst, ((other.grad - one.grad).norm() / one.grad.norm().clamp(min=1e-3)).item()
        )
    return worst


def test_blocks_are_recomputed_with_the_length_they_had() -> None:
    assert max(run_ranks(recomputed, 2)) < 1e-11


def gathered_logits() -> list[int]:
    """Numbers that this rank sends in a step of the model's own loss."""
    model = build("bloom")
    share(model)
    with recording() as recorder:
        model(**batch(False)).loss.backward()
    return [call.numel for call in recorder.calls if call.name == "all_gather_into_tensor"]


def test_a_loss_gathers_no_logits() -> None:
    """Each attention gathers its input and the residual, and the last block its output."""
    assert run_ranks(gathered_logits, 2)[0] == [2 * SEQUENCE // 2 * WIDTH] * 5


def call_with(call: dict[str, Any]) -> None:
    model = build("bloom")
    share(model)
    model(**batch(False), **call)


def call_in_another_order() -> None:
    model = build("bloom")
    share(model)
    model.transformer.h = model.transformer.h[::-1]  # type: ignore[union-attr, index, operator, assignment]
    model(**batch(False))


def split_lists() -> None:
    from transformers import AutoModelForCausalLM, XLMConfig

    sizes = {
        "emb_dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "vocab_size": 61,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    share(AutoModelForCausalLM.from_config(XLMConfig(**sizes)))


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="called with output_hidden_states"):
        run_ranks(call_with, 1, {"output_hidden_states": True})
    with pytest.raises(ConfigError, match="called with use_cache"):
        run_ranks(call_with, 1, {"use_cache": True})
    with pytest.raises(
        PlanError,
        match=r"a block \(BloomBlock\) was called with hidden states of shape \(2, 24, 32\)",
    ):
        run_ranks(call_in_another_order, 2)
    with pytest.raises(PlanError, match="XLMWithLMHeadModel has [34] lists of 2 blocks"):
        run_ranks(split_lists, 1)


class Shifted(nn.Module):
    """An MLP that also sees the token before, as RWKV's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x + 1e-3 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]).relu())


class Mlp(Shifted):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class WithMask(Mlp):
    """Nobody knows what it does with its second argument."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[:, mask.long()]


class Ends(Mlp):
    """What it does with tokens only shows at one of them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.cat([torch.zeros_like(x[:, :-1]), x[:, :1]], 1)


def test_a_trial_finds_what_mixes_tokens() -> None:
    block = nn.ModuleDict(
        {
            "mlp": Mlp(),
            "norm": nn.LayerNorm(WIDTH),
            "shifted": Shifted(),
            "masked": WithMask(),
            "ends": Ends(),
        }
    )
    assert [type(found) for found in mixing_tokens(block, WIDTH)] == [Shifted, WithMask, Ends]


class TwoWidths(nn.Module):
    """The output of an MLP of BERT: its first argument is wider than the hidden states."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.dense, self.mixes = nn.Linear(8, WIDTH), mixes

    def forward(self, inner: Tensor, hidden: Tensor) -> Tensor:
        return hidden + self.dense(inner.cumsum(1) if self.mixes else inner)


@pytest.mark.parametrize("mixes", [False, True])
def test_arguments_of_two_widths_are_tried(mixes: bool) -> None:
    block = nn.ModuleDict({"output": TwoWidths(mixes)})
    assert len(list(mixing_tokens(block, WIDTH))) == mixes


@pytest.mark.parametrize(
    ("kind", "name", "separate"), [(Shifted, "Plain", False), (Mlp, "MambaMlp", True)]
)
def test_the_name_of_a_class_and_its_package_do_not_decide_whether_it_mixes_tokens(
    kind: type[nn.Module], name: str, separate: bool
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES)
    model = LlamaForCausalLM(config)
    blocks = list(model.model.layers)
    assert mixes_by_attention(model, blocks)
    blocks[1].mlp = type(
        name, (kind,), {"__module__": "transformers.models.llama.modeling_llama"}
    )()
    assert mixes_by_attention(model, blocks) is separate


@pytest.mark.slow
def test_a_trial_of_a_large_module_on_meta_takes_little() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    with torch.device("meta"):
        mlp = LlamaMLP(LlamaConfig(hidden_size=2048, intermediate_size=8192))
    assert treats_tokens_separately(mlp, 2048)
    assert all(parameter.is_meta for parameter in mlp.parameters())
