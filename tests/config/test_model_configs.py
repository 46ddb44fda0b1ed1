"""Model configuration files against Transformers and the published numbers, and what ModelSpec
reads from them."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.training.module import transformers_config
from lightning_3d.errors import ConfigError
from lightning_3d.models.families import read_spec

FILES = sorted(
    file for file in (conf_folder() / "model").glob("*.yaml") if file.stem != "pretrained"
)
REQUIRED = {
    "llama3_1_8b",
    "llama3_1_70b",
    "llama3_70b",
    "llama2_7b",
    "llama2_13b",
    "llama2_70b",
    "mistral_7b",
    "qwen2_5_7b",
    "qwen2_5_32b",
    "qwen2_5_72b",
    "qwen3_8b",
    "qwen3_32b",
    "llama_tiny",
    "mixtral_8x7b",
    "mixtral_8x22b",
    "mixtral_tiny",
    "qwen3_30b_a3b",
    "qwen2_57b_a14b",
    "deepseek_v2_lite",
    "llama3_1_405b",
    "deepseek_v3",
    "qwen3_235b_a22b",
    "gpt_oss_120b",
    "gpt3_175b",
    "gpt_1t",
}
# Billions of parameters in all, and those that see a token, as published: arXiv:2401.04088 (table
# 1), mistral.ai/news/mixtral-8x22b, arXiv:2505.09388 (section 2), arXiv:2407.10671 (table 1);
# arXiv:2405.04434 (appendix B.1), arXiv:2412.19437 (section 4.2) and arXiv:2508.10925 (table 1),
# which leave out the embedding.
PUBLISHED = {
    "mixtral_8x7b": (47, 13),
    "mixtral_8x22b": (141, 39),
    "qwen3_30b_a3b": (30.5, 3.3),
    "qwen2_57b_a14b": (57.4, 14),
    "deepseek_v2_lite": (15.7, 2.4),
    "qwen3_235b_a22b": (235, 22),
    "deepseek_v3": (671, 37),
    "gpt_oss_120b": (116.83, 5.13),
}
WITHOUT_EMBEDDING = {"deepseek_v2_lite", "deepseek_v3", "gpt_oss_120b"}
TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def read(path: Any) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def on_meta(config: dict[str, Any], **kwargs: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(transformers_config(config), **kwargs)


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes by name; older releases of Transformers call the output head of GPT-NeoX
    `embed_out`."""
    return {
        name.replace("embed_out", "lm_head"): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
    }


def test_the_published_models_are_there() -> None:
    assert {path.stem for path in FILES} >= REQUIRED


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_parameters_equal_transformers_and_the_published_count(path: Any) -> None:
    entry = read(path)
    spec = read_spec(entry["config"])
    model = on_meta(entry["config"])
    assert entry["name"] == path.stem
    assert spec.shapes == shapes_of(model)
    assert (
        spec.parameters
        == sum(parameter.numel() for parameter in model.parameters())
        == entry["published_parameters"]
    )
    assert spec.active_parameters == entry.get("active_parameters", spec.parameters)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sizes_equal_those_of_transformers(path: Any) -> None:
    fields = read(path)["config"]
    spec, config = read_spec(fields), transformers_config(fields)
    assert (spec.hidden, spec.layers, spec.heads) == (
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
    )
    assert spec.kv_heads == getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert (spec.vocab, spec.max_positions) == (config.vocab_size, config.max_position_embeddings)
    assert spec.tied == config.tie_word_embeddings
    assert spec.intermediate == (
        config.n_inner if config.model_type == "gpt2" else config.intermediate_size
    )
    experts = next((value for name in EXPERTS if (value := getattr(config, name, None))), 0)
    assert (spec.experts, spec.top_k) == (experts, config.num_experts_per_tok if experts else 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_mixtures_have_the_published_number_of_parameters(name: str) -> None:
    """In all and for each token; counted on the model of Transformers, an expert being one entry of
    its tensors."""
    entry = read(conf_folder() / "model" / f"{name}.yaml")
    config = transformers_config(entry["config"])
    counts = {
        key: parameter.numel() for key, parameter in on_meta(entry["config"]).named_parameters()
    }
    experts = next(value for key in EXPERTS if (value := getattr(config, key, None)))
    unused = sum(
        count // experts * (experts - config.num_experts_per_tok)
        for key, count in counts.items()
        if ".experts." in key
    )
    total, active = PUBLISHED[name]
    assert entry["active_parameters"] == sum(counts.values()) - unused
    assert sum(counts.values()) == pytest.approx(total * 1e9, rel=0.01)
    embedding = counts["model.embed_tokens.weight"] if name in WITHOUT_EMBEDDING else 0
    assert entry["active_parameters"] - embedding == pytest.approx(active * 1e9, rel=0.03)


@pytest.mark.parametrize(("name", "billions"), [("gpt3_175b", 174.6), ("gpt_1t", 1008.0)])
def test_gpts_have_the_number_of_parameters_of_the_paper(name: str, billions: float) -> None:
    """Narayanan et al. (arXiv:2104.04473), equation 2 and table 1; the equation leaves out the last
    LayerNorm."""
    sizes = read(conf_folder() / "model" / f"{name}.yaml")["config"]
    layers, hidden, vocab, seq = (
        sizes[key] for key in ("n_layer", "n_embd", "vocab_size", "n_positions")
    )
    counted = 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + seq) * hidden
    assert read_spec(sizes).parameters == counted + 2 * hidden
    assert round(counted / 1e9, 1) == billions


def test_deepseek_v3_has_685_billion_parameters_with_its_module_for_multi_token_prediction() -> (
    None
):
    """Its README counts 671 billion and 14 billion, which include copies of the embedding and of
    the head. Transformers builds the module next to the model, and only for generation."""
    model = on_meta(read(conf_folder() / "model" / "deepseek_v3.yaml")["config"])
    with torch.device("meta"):
        module = MtpModel(model, 1)
    assert "MtpLayer" not in {type(part).__name__ for part in model.modules()}
    main, further = (
        sum(parameter.numel() for parameter in part.parameters()) for part in (model, module)
    )
    assert (main, main + further) == (
        pytest.approx(671e9, rel=1e-3),
        pytest.approx(685e9, rel=1e-3),
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transformers_knows_every_field(path: Any) -> None:
    """Transformers keeps unknown fields without a word, so a misspelt one would leave a default in
    place."""
    fields = {key: value for key, value in read(path)["config"].items() if key != "model_type"}
    config = AutoConfig.for_model(read(path)["config"]["model_type"])
    read_all_the_same = {"head_dim"} if config.model_type == "qwen3_moe" else set()
    assert fields.keys() <= {*config.to_dict(), *config.attribute_map, *read_all_the_same}


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"]
)
def test_fields_that_are_left_out_take_the_defaults_of_transformers(model_type: str) -> None:
    sizes = {**TINY_LLAMA, "model_type": model_type, "num_attention_heads": 32, "hidden_size": 64}
    spec, config = read_spec(sizes), transformers_config({**sizes, "pad_token_id": None})
    model = on_meta({**sizes, "pad_token_id": None})
    assert spec.shapes == shapes_of(model)
    assert spec.max_positions == config.max_position_embeddings
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    assert spec.windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 2, "head_dim": 8},
        {"model_type": "gpt_neox", "attention_bias": False},
        {"model_type": "gpt_neox", "tie_word_embeddings": True},
        {"model_type": "gpt2", "tie_word_embeddings": False, "intermediate_size": None},
        {"model_type": "gpt2", "n_inner": 40, "intermediate_size": None},
    ],
    ids=str,
)
def test_options_change_shapes_as_in_transformers(changes: dict[str, Any]) -> None:
    fields = {key: value for key, value in {**TINY_LLAMA, **changes}.items() if value is not None}
    assert read_spec(fields).shapes == shapes_of(on_meta(fields))


@pytest.mark.parametrize("tied", [False, True])
def test_flops_equal_those_that_torch_counts(tied: bool) -> None:
    fields = {**TINY_LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    seq = 24
    model = AutoModelForCausalLM.from_config(
        transformers_config(fields), attn_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, seq, dtype=torch.long))
    forward = counter.get_total_flops()
    # Some releases of Transformers make the rotary angles by a matrix product, head_dim / 2 x 1 x
    # seq.
    rotary = 2 * (4 // 2) * seq
    assert 0 <= 3 * forward - read_spec(fields).flops_per_token(seq) * seq <= 3 * rotary


def test_windows_bound_attention_flops() -> None:
    fields = {**TINY_LLAMA, "model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 8}
    spec = read_spec(fields)
    without = read_spec({**TINY_LLAMA, "model_type": "llama"})
    assert spec.windows == (8, 8)
    assert without.flops_per_token(32) - spec.flops_per_token(32) == 12 * 2 * 16 * (32 - 8)


def test_qwen_windows_begin_at_a_layer() -> None:
    fields = {
        **TINY_LLAMA,
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    }
    assert read_spec(fields).windows == (None, 8)


def test_an_unknown_family_still_gives_its_sizes() -> None:
    spec = read_spec(
        {
            "model_type": "gptj",
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "vocab_size": 100,
        }
    )
    assert (spec.hidden, spec.layers, spec.heads, spec.kv_heads) == (48, 3, 4, 4)
    assert (spec.head_dim, spec.max_positions) == (12, 64)
    assert spec.parameters is None
    with pytest.raises(ConfigError, match="gptj"):
        spec.flops_per_token(8)


def test_experts_are_seen() -> None:
    fields = {**TINY_LLAMA, "model_type": "jamba", "num_experts": 8, "num_experts_per_tok": 2}
    spec = read_spec(fields)
    assert (spec.experts, spec.top_k, spec.parameters) == (8, 2, None)


@pytest.mark.parametrize(
    "name", ["mixtral_tiny", "qwen3_moe_tiny", "deepseek_v3_tiny", "gpt_oss_tiny"]
)
def test_flops_of_a_mixture_equal_those_that_torch_counts(name: str) -> None:
    """Of experts those of the tokens that they see."""
    fields = {**read(conf_folder() / "model" / f"{name}.yaml")["config"], "num_hidden_layers": 2}
    config = transformers_config(fields)
    config._experts_implementation = "eager"
    seq = 24
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, seq, dtype=torch.long))
    spec = read_spec(fields)
    assert 3 * counter.get_total_flops() / seq == pytest.approx(spec.flops_per_token(seq), rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "model_type"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers of the model must be .*; got 0"),
        (
            {"num_attention_heads": "four"},
            "num_attention_heads of the model must be .*; got 'four'",
        ),
        (
            {"layer_types": ["full_attention"]},
            "layer_types of the model must have one entry per layer",
        ),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec({**TINY_LLAMA, **changes})


def test_an_unknown_model_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no model_type 'llamma'. Did you mean \"llama\"\?$"):
        transformers_config({**TINY_LLAMA, "model_type": "llamma"})


def test_reading_sizes_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import lightning_3d.models.spec; import"
        " lightning_3d.app.training.data.token_file;sys.exit(bool({'torch', 'transformers',"
        " 'lightning'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_f19_fields_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            "model.config has no field 'hiden_size' for model_type 'llama'. Did you mean"
            ' "hidden_size"'
        ),
    ):
        transformers_config({"model_type": "llama", "hiden_size": 8})
    assert (
        transformers_config(
            {"model_type": "llama", "hidden_size": 64, "rope_theta": 5e5}
        ).hidden_size
        == 64
    )


def test_fields_that_only_the_code_of_a_family_knows_are_taken() -> None:
    """Qwen3-MoE's published configuration has a head_dim, which its class does not declare and its
    attention reads."""
    assert transformers_config({"model_type": "qwen3_moe", "head_dim": 64}).head_dim == 64
