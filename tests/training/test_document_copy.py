"""The trial of a model with document masks decides as rows show that are longer than every window
and compressed block of the model."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, MistralForCausalLM, masking_utils

from lightning_3d.app.training.document_copy import trial_copy
from lightning_3d.app.training.document_trial import require_separate_documents
from lightning_3d.app.training.token_lengths import is_length, shorten
from lightning_3d.compat.transformers_masks import give_positions_to_masks
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.trials.values import FewRows

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from family_configs import NO_REFERENCE, families, tiny_config

DOCUMENTS = (17, 13, 11, 7)


class Exact(TorchFunctionMode):
    """Computes in float64 what a model computes in float32: softmax, norms, rotary positions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        return func(
            *wide,
            **{
                key: torch.float64 if value is torch.float32 else value
                for key, value in (kwargs or {}).items()
            },
        )


def config_of(family: str, **fields: Any) -> Any:
    """A small configuration with other fields, from which the configuration derives those that
    depend on them."""
    pytest.importorskip(f"transformers.models.{family}")
    small = tiny_config(family).to_dict()
    derived = ("layer_types", "mlp_layer_types", "indexer_types", "compress_rates")
    return CONFIG_MAPPING[family](
        **{key: value for key, value in small.items() if key not in derived} | fields
    )


def on_meta(config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    give_positions_to_masks(model)
    return model


def difference(config: Any) -> float:
    """Of packed documents and each document alone, relative to the largest output, in float64."""
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # grouped products do not know float64
    model: Any = (
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    )
    give_positions_to_masks(model)
    for value in model.parameters():
        if value.is_floating_point():
            nn.init.normal_(value, std=value.shape[-1] ** -0.5 if value.ndim > 1 else 1.0)
    ids = torch.randint(3, 60, (1, sum(DOCUMENTS)))
    positions = torch.cat([torch.arange(size) for size in DOCUMENTS])[None]
    with torch.no_grad(), Exact():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = torch.cat(
            [
                model(input_ids=document, use_cache=False).logits
                for document in ids.split(DOCUMENTS, dim=1)
            ],
            dim=1,
        )
    return float((packed - alone).abs().max() / alone.abs().max())


RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}


@pytest.mark.parametrize("kind", ["sliding_attention", *RATES])
def test_compressed_blocks_that_do_not_follow_documents_are_refused(kind: str) -> None:
    """DeepSeek-V4 compresses blocks of 4 and of 128 tokens of the row: the second are longer than
    the rows of the trial."""
    fields: dict[str, Any] = {"layer_types": [kind] * 4, "index_topk": 64}
    found = difference(config_of("deepseek_v4", **fields, compress_rates=RATES))
    model = on_meta(config_of("deepseek_v4", **fields))
    if kind == "sliding_attention":
        assert found <= 1e-12
        require_separate_documents(model)
    else:
        assert found > 1e-2
        with pytest.raises(
            ConfigError,
            match=(
                "cannot be used with DeepseekV4ForCausalLM: its results in a document depend on the"
                " other"
            ),
        ):
            require_separate_documents(model)


def test_blocks_that_share_an_indexer_are_tried_with_it() -> None:
    """Of the 34 blocks of HY-V4, the last but one takes the tokens that the indexer of the block 3
    before it chose."""
    assert difference(config_of("hy_v4", num_hidden_layers=10, index_topk=64)) <= 1e-12
    require_separate_documents(on_meta(config_of("hy_v4", num_hidden_layers=34)))


@pytest.mark.parametrize(("family", "fields"), [("bert", {"is_decoder": True}), ("xglm", {})])
def test_a_bias_of_the_head_and_scores_masked_in_float32_pass_the_trial(
    family: str, fields: dict[str, Any]
) -> None:
    """BERT gives the bias of its head to the module around it, too. XGLM masks scores with the
    smallest number of their type."""
    torch.set_default_dtype(torch.float64)
    try:
        assert difference(config_of(family, **fields)) <= 1e-12
    finally:
        torch.set_default_dtype(torch.float32)
    require_separate_documents(on_meta(config_of(family, **fields)))
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("family", ["apertus", "deepseek_v2"])
def test_values_of_a_checkpoint_and_latent_attention_pass_the_trial(family: str) -> None:
    """Nothing rebuilds the buffers of Apertus' activations, which are saved with its weights.
    DeepSeek-V2 rotates complex numbers."""
    assert difference(config_of(family)) <= 1e-12
    require_separate_documents(on_meta(config_of(family)))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        # its matrices are transposed (Conv1D)
        ("gpt2", {"n_embd": 3072, "n_head": 4, "n_layer": 2}),
        (
            "apertus",
            {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            },
        ),
        # positions from the mask (ALiBi)
        ("bloom", {"hidden_size": 3072, "n_head": 4, "n_layer": 2}),
        pytest.param("mpt", {"d_model": 3072, "n_heads": 4, "n_layers": 2}, marks=pytest.mark.full),
        pytest.param(
            "gpt_neox",
            {"hidden_size": 3072, "intermediate_size": 64, "num_hidden_layers": 2},
            marks=pytest.mark.full,
        ),
    ],
)
def test_large_matrices_and_layer_norms_hide_no_documents(
    family: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer norm takes away what attention adds to all features alike, so the rows of a large
    matrix must differ."""
    # one document, to masks made of positions
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", torch.zeros_like)
    with pytest.raises(
        ConfigError,
        match=r"cannot be used with \w+: its results in a document depend on the other documents",
    ):
        require_separate_documents(on_meta(CONFIG_MAPPING[family](vocab_size=67, **sizes)))


def test_weights_of_tokens_of_a_block_follow_the_length_of_the_block() -> None:
    model: Any = on_meta(config_of("deepseek_v4", layer_types=["heavily_compressed_attention"] * 4))
    copied = trial_copy(model, FewRows())
    for each, length in ((model, 128), (copied, 3)):
        compressor = each.model.layers[0].self_attn.compressor
        assert (compressor.position_bias.shape[0], compressor.compress_rate) == (length, length)
        assert each.config.compress_rates["heavily_compressed_attention"] == length


class Wide(MistralForCausalLM):
    """A model that a configuration is not enough to build."""

    def __init__(self, config: Any, chunk_size: int) -> None:
        super().__init__(config)
        self.chunk_size, self.num_chunks = chunk_size, 5


def test_a_model_that_cannot_be_built_again_has_shorter_lengths_too() -> None:
    with torch.device("meta"):
        model: Any = Wide(config_of("mistral", sliding_window=4096), chunk_size=64)
    shorten(model, 3)
    assert (
        model.chunk_size,
        model.num_chunks,
        model.config.sliding_window,
        model.config.vocab_size,
    ) == (3, 5, 3, 67)


LOOSE = re.compile(r"window|chunk|block|compress|stride|span|topk|budget|segment|local")
OTHER = {
    "chunk_size_feed_forward": "rows of a product",
    "chunk_size_lm_head": "rows of a product",
    "max_inference_chunksize": "not in training",
    "max_window_layers": "layers",
    "num_local_experts": "experts",
    "block_multiple_of": "rows of a matrix",
    "num_blocks": "layers",
    "n_layers_per_attn_res_block": "layers",
    "segment_types": "kinds of tokens",
    "mask_time_length": "of sound",
    "moe_topk": "experts",
    "topk_group": "groups of experts",
    "num_local_layers": "layers",
}


@pytest.mark.slow
def test_lengths_in_tokens_of_all_families_are_found_by_their_names() -> None:
    """Whole numbers of configurations, above the rows of the trial, that look like a length are
    one, or are known to be something else."""
    unknown: set[str] = set()
    found: set[str] = set()
    for family in set(families()) - set(NO_REFERENCE):
        for name, value in vars(CONFIG_MAPPING[family]()).items():
            numbers = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, (list, tuple))
                else [value]
            )
            if LOOSE.search(name) and any(
                type(number) is int and number > 12 for number in numbers
            ):
                (found if is_length(name) else unknown).add(name)
    assert unknown <= OTHER.keys(), unknown - OTHER.keys()
    assert {
        "sliding_window",
        "attention_chunk_size",
        "index_topk",
        "compress_rates",
        "index_block_size",
        "local_attention",
    } <= found
    assert not any(
        map(
            is_length,
            (*OTHER, "sliding_window_pattern", "num_windows", "index_local_blocks", "patch_size"),
        )
    )
