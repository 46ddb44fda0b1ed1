"""Tiny models of every family that the suite trains, and a hand-written one with its own plan.

They are small enough for 20 steps in seconds and awkward on purpose: key/value heads fewer than
tensor-parallel ranks, vocabularies that 2 and 4 do not divide, tied embeddings, biases, packed
projections, layers of different kinds.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from lightning_3d.app.config.files import conf_folder

SEQUENCE = 16
IGNORE = -100
Batch = dict[str, Tensor]

# Family -> (class prefix in Transformers, configuration on top of COMMON).
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"vocab_size": 67, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {"vocab_size": 64, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"vocab_size": 72, "num_key_value_heads": 2, "head_dim": 16}),
    "mistral": (
        "Mistral",
        {
            "vocab_size": 101,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "sliding_window": 8,
        },
    ),
    "gpt_neox": (
        "GPTNeoX",
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 128,
            "hidden_dropout": 0.0,
            "rotary_pct": 0.25,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "vocab_size": 70,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "sliding_window": 8,
            "tie_word_embeddings": True,
            "final_logit_softcapping": 30.0,
        },
    ),
    "phi3": (
        "Phi3",
        {"vocab_size": 68, "num_key_value_heads": 2, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
}
# Mixtures of 8 experts, of which a token sees 2.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "Mixtral",
        {"vocab_size": 67, "num_key_value_heads": 2, "num_local_experts": 8, "sliding_window": 8},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "vocab_size": 72,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "vocab_size": 64,
            "num_key_value_heads": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "vocab_size": 71,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "mlp_layer_types": None,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "vocab_size": 68,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
        },
    ),
}
PLAIN = "plain"
MODELS = (*FAMILIES, PLAIN)
# Whose blocks are made in other ways: norms behind layers, norms over all heads between gather
# pairs, parallel branches, multipliers.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 8,
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2", {"vocab_size": 64, "num_key_value_heads": 2}),
    "glm4": ("Glm4", {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8}),
    "cohere": ("Cohere", {"vocab_size": 64, "num_key_value_heads": 2, "use_qk_norm": True}),
    "granite": (
        "Granite",
        {
            "vocab_size": 64,
            "num_key_value_heads": 2,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
    "gemma2": (
        "Gemma2",
        {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
    ),
    "starcoder2": (
        "Starcoder2",
        {"vocab_size": 64, "num_key_value_heads": 2, "residual_dropout": 0.0},
    ),
    "deepseek_v3_dense": (
        "DeepseekV3",
        {
            "vocab_size": 64,
            "first_k_dense_replace": 99,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    # Positions beyond the original ones are scaled.
    "llama_yarn": ("Llama", {"vocab_size": 67, "num_key_value_heads": 2, "rope_parameters": YARN}),
    "qwen3_yarn": (
        "Qwen3",
        {"vocab_size": 72, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": YARN},
    ),
}
# Read from `conf/model`: tiny models of the families of large ones.
OF_CONF = ("llama_tiny", "gpt2_tiny", "gpt_oss_tiny", "deepseek_v3_tiny", "qwen3_moe_tiny")


def build(name: str, layers: int = 4) -> nn.Module:
    """The model of a family with ``layers`` blocks, on the current default device, in the current
    default dtype.

    In float64 its norms keep double precision, see ``keep_double``.
    """
    if name == PLAIN:
        return PlainModel(layers)
    if name in OF_CONF:
        return build_from_conf(name, layers)
    import transformers

    prefix, own = (FAMILIES | MIXTURES | OTHERS)[name]
    config_class = getattr(transformers, prefix + ("TextConfig" if name == "gemma3" else "Config"))
    settings = COMMON | own | {"num_hidden_layers": layers}
    if name == "gemma3":
        kinds = ("sliding_attention", "sliding_attention", "full_attention")
        settings["layer_types"] = [kinds[index % 3] for index in range(layers)]
    config = config_class(**settings)
    if name in MIXTURES and torch.get_default_dtype() == torch.float64:
        config._experts_implementation = "eager"  # grouped matrix products do not know float64
    model = getattr(transformers, prefix + "ForCausalLM")(config)
    if torch.get_default_dtype() == torch.float64:
        keep_double(model)
    return model


def conf(name: str) -> dict[str, Any]:
    """An entry of `conf/model`."""
    return yaml.safe_load((conf_folder() / "model" / f"{name}.yaml").read_text())


def build_from_conf(name: str, layers: int) -> nn.Module:
    """A model of `conf/model`, as `build`."""
    from transformers import AutoModelForCausalLM

    from lightning_3d.app.training.module import transformers_config

    entry = conf(name)
    config = transformers_config(entry["config"] | {"pad_token_id": None, "use_cache": False})
    config.num_hidden_layers = layers
    if torch.get_default_dtype() == torch.float64:
        config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=entry["attn_implementation"]
    )
    if torch.get_default_dtype() == torch.float64:
        keep_double(model)
    return model


def keep_double(model: nn.Module) -> None:
    """Let the RMS norms and routers of a Transformers model compute in the dtype of their input.

    They round to float32 inside, whatever the model's dtype. Then a gradient that was scaled before
    the norm instead of after the step, or summed in another order, is rounded to another float32,
    and float64 would show 1e-8 for equal arithmetic. Nothing else in these models rounds what
    depends on weights.
    """
    doubled: dict[type, type] = {}
    for module in model.modules():
        kind = type(module)
        if kind.__name__.lower().endswith(("rmsnorm", "topkrouter")):
            made = _double_norm if kind.__name__.endswith("RMSNorm") else _double_router
            doubled[kind] = doubled.get(kind) or made(kind)
            object.__setattr__(module, "__class__", doubled[kind])


def _double_norm(kind: type) -> type:
    # Gemma's weights are distances from one
    shift = 1.0 if kind.__name__.startswith("Gemma") else 0.0

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        epsilon = self.eps if hasattr(self, "eps") else self.variance_epsilon
        variance = hidden_states.square().mean(-1, keepdim=True)
        return hidden_states * torch.rsqrt(variance + epsilon) * (shift + self.weight)

    return type(kind.__name__, (kind,), {"forward": forward})


def _double_router(kind: type) -> type:
    """The router's own code with float64 where it says float32."""
    source = textwrap.dedent(inspect.getsource(kind.forward))  # type: ignore[attr-defined]
    for single, double in (
        ("torch.float32", "torch.float64"),
        ("dtype=torch.float,", "dtype=torch.float64,"),
        (".float()", ".double()"),
    ):
        source = source.replace(single, double)
    scope: dict[str, Any] = {}
    exec(source, vars(sys.modules[kind.__module__]), scope)
    return type(kind.__name__, (kind,), scope)


def vocabulary(name: str) -> int:
    return PlainModel.vocabulary if name == PLAIN else _sizes(name)["vocab_size"]


def experts_of_a_token(name: str) -> int:
    """Experts that the router of a mixture chooses for each token."""
    with torch.device("meta"):
        return build(name).config.num_experts_per_tok  # type: ignore[return-value, union-attr]


def _sizes(name: str) -> dict[str, Any]:
    return conf(name)["config"] if name in OF_CONF else (FAMILIES | MIXTURES | OTHERS)[name][1]


@dataclass(frozen=True)
class Task:
    """What a family's batch holds and how its user computes the loss: ``step(model, batch) ->
    scalar``."""

    data: Callable[[int, int, torch.Generator], Batch]
    step: Callable[[nn.Module, Batch], Tensor]
    token_losses: Callable[..., Tensor]


def task(name: str) -> Task:
    return PLAIN_TASK if name == PLAIN else CAUSAL_TASK


def tokens(rows: int, length: int, first: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Token ids in [first, vocab), small ones more often, so that there is something to learn;
    shape (rows, length)."""
    uniform = torch.rand((rows, length), generator=generator)
    return first + (uniform.square() * (vocab - first)).long()


def causal_data(rows: int, vocab: int, generator: torch.Generator) -> Batch:
    """Rows of tokens whose first 0 to 7 labels are no targets, so that rows weigh differently."""
    ids = tokens(rows, SEQUENCE, 3, vocab, generator)
    prompt = torch.randint(0, 8, (rows, 1), generator=generator)
    labels = torch.where(torch.arange(SEQUENCE) < prompt, IGNORE, ids)
    return {"input_ids": ids, "labels": labels}


def causal_step(model: nn.Module, batch: Batch) -> Tensor:
    """What users of Transformers write."""
    return model(**batch).loss


def causal_token_losses(
    model: nn.Module, batch: Batch, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Losses of the target tokens from full logits, in the dtype of the model; shape (targets,)."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    if label_smoothing or z_loss:
        return terms_of_loss(
            logits[targets != IGNORE], targets[targets != IGNORE], label_smoothing, z_loss
        )
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")[
        targets != IGNORE
    ]


def terms_of_loss(logits: Tensor, targets: Tensor, label_smoothing: float, z_loss: float) -> Tensor:
    """Cross-entropy with the smoothed distribution of targets written out, and the z-loss;
    (targets,)."""
    log_z = logits.exp().sum(-1).log()
    log_probabilities = logits - log_z[:, None]
    wanted = torch.full_like(logits, label_smoothing / logits.shape[1])
    wanted[torch.arange(len(targets)), targets] += 1 - label_smoothing
    return -(wanted * log_probabilities).sum(-1) + z_loss * log_z**2


def plain_data(rows: int, vocab: int, generator: torch.Generator) -> Batch:
    return {"tokens": tokens(rows, SEQUENCE + 1, 0, vocab, generator)}


def plain_step(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def plain_token_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none")


CAUSAL_TASK = Task(causal_data, causal_step, causal_token_losses)
PLAIN_TASK = Task(plain_data, plain_step, plain_token_losses)


class PlainModel(nn.Module):
    """A decoder as one writes it by hand: no configuration, no Transformers, learned positions, a
    chain of blocks."""

    vocabulary = 66
    plan = {
        "tp": {
            "blocks.*.q": "colwise",
            "blocks.*.k": "colwise",
            "blocks.*.v": "colwise",
            "blocks.*.o": "rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "head": "colwise_gather_output",
        },
        "pp": {
            "embed": (["tokens"], ["h"]),
            "blocks": (["h"], ["h"]),
            "norm": (["h"], ["h"]),
            "head": (["h"], ["logits"]),
        },
    }

    def __init__(self, layers: int, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = PlainEmbedding(self.vocabulary, SEQUENCE, width)
        self.blocks = nn.Sequential(*(PlainBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


class PlainEmbedding(nn.Module):
    def __init__(self, vocabulary: int, positions: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(
            torch.arange(tokens.shape[1], device=tokens.device)
        )


class PlainBlock(nn.Module):
    """Attention and MLP; the number of heads is read from the width of ``q``, as a tensor-parallel
    rank has fewer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.v, self.o = (nn.Linear(width, width) for _ in range(3))
        # its gradient would be zero but for rounding, which Adam amplifies
        self.k = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        normed = self.norm_1(h)
        q, k, v = (self._heads(layer(normed)) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.o(mixed.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.norm_2(h))))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, seq, heads * head_width) -> (batch, heads, seq, head_width)."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
