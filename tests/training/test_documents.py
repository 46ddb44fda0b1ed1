"""Documents of a packed sample train as if each were alone: on one process, in every layout, with
every implementation of attention."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import numpy as np
import parity
import pytest
import torch
from command_line import run_commands
from composed_configs import composed
from context_batches import world_size
from counting import HostWaits
from fake_flash import fake_flash, flash_attn_varlen_func, use_flash, varlen_with_sinks
from models import IGNORE, Batch
from parity import Noise, Rows, fit_on_rank
from ranks import run_ranks
from reference import Recipe, initial_model, target_count, train_on
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils
from transformers.masking_utils import create_causal_mask
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from transformers.models.mistral import modeling_mistral

from lightning_3d.app.config.plan_run import plan_run
from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.data.documents import begins_after, restarting_positions
from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.app.training.data.packing import PackedDataset, Tokens
from lightning_3d.app.training.data.token_file import write_tokens
from lightning_3d.app.training.document_inputs import inputs_of
from lightning_3d.app.training.document_trial import require_separate_documents
from lightning_3d.app.training.module import CausalLM
from lightning_3d.compat.transformers_flash import document_lengths
from lightning_3d.compat.transformers_masks import give_positions_to_masks
from lightning_3d.engine.step.known_values import KnownValues
from lightning_3d.errors import ConfigError, DataError
from lightning_3d.layout import Layout
from lightning_3d.models.document_limits import check_documents

LENGTH, END = models.SEQUENCE, 2


def tokens_of(rows: int, seed: int = 0, vocabulary: int = 60) -> Tokens:
    """Documents of 1 to 24 tokens with their separator: some go over the end of a sample."""
    generator = np.random.default_rng(seed)
    values = generator.integers(3, vocabulary, rows * LENGTH)
    ends = generator.integers(1, 25, rows * LENGTH).cumsum()
    values[ends[ends < len(values)]] = END
    return Tokens(values.astype(np.uint16), "a test", END)


def packed(rows: int) -> Batch:
    samples = PackedDataset(tokens_of(rows), LENGTH, document_mask=True)
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def documents_of(batch: Batch) -> list[Batch]:
    """Each document of the samples alone, found by a loop over tokens."""
    found: list[Batch] = []
    for row in batch["input_ids"].tolist():
        document: list[int] = []
        for place, token in enumerate(row):
            document.append(token)
            if token == END or place == LENGTH - 1:
                found.append({key: torch.tensor([document]) for key in ("input_ids", "labels")})
                document = []
    return [document for document in found if document["input_ids"].shape[1] > 1]


# Samples


def test_positions_restart_after_each_separator() -> None:
    ids = torch.tensor([7, END, END, 5, 6, 7, END, 8])
    begins = begins_after(ids, END)
    assert begins.tolist() == [True, False, True, True, False, False, False, True]
    assert restarting_positions(begins).tolist() == [0, 1, 0, 0, 1, 2, 3, 0]


def test_the_first_token_of_a_document_is_no_target_with_a_mask() -> None:
    tokens = Tokens(
        np.array([7, END, 5, 6, END, 8, 9, 10, 11, 12, END, 13], dtype=np.uint16), "a test", END
    )
    samples = list(PackedDataset(tokens, 6, document_mask=True))
    assert [sample["labels"].tolist() for sample in samples] == [
        [7, END, IGNORE, 6, END, IGNORE],
        [9, 10, 11, 12, END, IGNORE],
    ]
    assert [sample["position_ids"].tolist() for sample in samples] == [
        [0, 1, 0, 1, 2, 0],
        [0, 1, 2, 3, 4, 0],
    ]
    assert "position_ids" not in PackedDataset(tokens, 6)[0]
    with pytest.raises(
        DataError,
        match="data.document_mask=true needs the ends of documents, and a test does not say them",
    ):
        PackedDataset(Tokens(tokens.values, "a test"), 6, document_mask=True)[0]


def of_kind(kind: str, folder: Path) -> Any:
    tokens = tokens_of(40)
    write_tokens(folder / "x.bin", np.asarray(tokens.values), vocab_size=60, document_separator=END)
    configs: dict[str, dict[str, Any]] = {
        "tokens": {"train_path": str(folder / "x.bin")},
        "blend": {"sources": {"x": {"train_path": str(folder / "x.bin"), "weight": 1}}},
        "python_stdlib": {"root": str(folder)},
    }
    for index in range(20):
        (folder / f"{index}.py").write_text(f"x = {index}\n" * (index + 1))
    config = {
        "name": kind,
        "sequence_length": LENGTH,
        "document_mask": True,
        "val_fraction": 0.25,
        **configs[kind],
    }
    config |= {"num_workers": 0}
    if kind == "blend":
        del config["val_fraction"]
    return make_data_module(config, global_batch_size=2, seed=0)


@pytest.mark.parametrize("kind", ["tokens", "blend", "python_stdlib"])
def test_every_data_module_gives_positions(kind: str, tmp_path: Path) -> None:
    data = of_kind(kind, tmp_path)
    data.setup()
    separator = 256 if kind == "python_stdlib" else END
    validation = data.val_dataloader()
    for loader in (
        data.train_dataloader(),
        *(validation if isinstance(validation, list) else [validation]),
    ):
        batches = list(loader)
        assert batches
        for batch in batches:
            for ids, labels, positions in zip(
                batch["input_ids"], batch["labels"], batch["position_ids"], strict=True
            ):
                place = 0
                for index, token in enumerate(ids.tolist()):
                    assert positions[index] == place
                    assert labels[index] == (IGNORE if place == 0 and index else token)
                    place = 0 if token == separator else place + 1


# One process


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Sum over target tokens, in float64; a model of Transformers computes its own loss in
    float32."""
    logits = model(**inputs_of(batch, model)).logits[:, :-1]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def gradients(
    model: nn.Module, batches: list[Batch], whole: int
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, as the mean over so many target tokens."""
    model.zero_grad()
    losses = []
    for batch in batches:
        losses.append(loss_of(model, batch) / whole)
        losses[-1].backward()
    found = {
        name: value.grad.clone()
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    return sum(loss.item() for loss in losses), found


@pytest.mark.parametrize(
    "attention", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_a_packed_sample_equals_its_documents_alone(family: str, attention: str) -> None:
    batch = packed(3)
    whole = target_count("llama", batch)
    # eager has a softmax in float32
    tolerance = {"sdpa": 1e-12, "eager": 1e-6, "flex_attention": 1e-6}[attention]
    model: Any = initial_model(
        Recipe(family, dtype="float32" if attention == "flex_attention" else "float64")
    )
    expected, wanted = gradients(model, documents_of(batch), whole)
    model.set_attn_implementation(attention)
    if attention == "flex_attention":  # torch has neither a backward of it on the CPU nor float64
        with torch.no_grad():
            assert loss_of(model, batch).item() / whole == pytest.approx(expected, rel=tolerance)
        return
    loss, found = gradients(model, [batch], whole)
    assert loss == pytest.approx(expected, rel=tolerance)
    largest = max(value.abs().max() for value in wanted.values())
    assert all((found[name] - wanted[name]).abs().max() <= tolerance * largest for name in wanted)
    across, _ = gradients(model, [{key: batch[key] for key in ("input_ids", "labels")}], whole)
    assert abs(across - expected) > 1e-4, "the batch shows attention across documents"


FLASH = [
    ("llama", "flash_attention_2", flash_attn_varlen_func),
    ("mistral", "flash_attention_3", flash_attn_varlen_func),  # with windows
    ("gpt_oss", "flash_attention_3", varlen_with_sinks),
]


@pytest.mark.parametrize(("family", "name", "kernel"), FLASH)
def test_flash_attention_separates_the_documents_of_several_rows(
    family: str, name: str, kernel: Any
) -> None:
    batch = packed(3)
    whole = target_count("llama", batch)
    model: Any = initial_model(Recipe(family, dtype="float64"))
    expected, wanted = gradients(model, documents_of(batch), whole)
    with fake_flash(kernel):
        use_flash(model, name)
        loss, found = gradients(model, [batch], whole)
        assert loss == pytest.approx(expected, rel=1e-12)
    largest = max(value.abs().max() for value in wanted.values())
    assert all((found[key] - wanted[key]).abs().max() <= 1e-12 * largest for key in wanted)


@pytest.mark.parametrize(("knows", "reads"), [(True, 0), (False, 2)])
def test_the_host_learns_the_lengths_of_documents_once(knows: bool, reads: int) -> None:
    """It reads nothing in the layers, and nothing at all if it knows the batch, as in training.
    Otherwise it reads the number of documents, and Transformers, which makes no mask here, whether
    there are several."""
    model: Any = initial_model(Recipe("mistral", dtype="float64"))
    known = KnownValues(torch.device("cpu"), wanted=knows)
    with fake_flash():
        use_flash(model)
        known.begin(model)
        with known.moving():
            moved = {key: value.to("cpu", copy=True) for key, value in packed(3).items()}
        with HostWaits(("read_host_copy",)) as waits, known.following():
            loss_of(model, moved)
        known.end()
    assert len(waits.names) == reads, waits.names


def test_lengths_of_documents_are_those_of_a_loop_over_tokens() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 0, 1, 2]])
    lengths = document_lengths(positions)
    assert (
        lengths["cu_seq_lens_q"].tolist()
        == lengths["cu_seq_lens_k"].tolist()
        == [0, 3, 5, 6, 7, 10]
    )
    assert lengths["cu_seq_lens_q"].dtype == torch.int32
    assert lengths["max_length_q"] == lengths["max_length_k"] == 5


def test_sinks_and_windows_stay_in_a_document() -> None:
    """GPT-OSS makes its masks without positions."""
    batch = packed(3)
    whole = target_count("gpt_oss", batch)
    model: Any = initial_model(Recipe("gpt_oss", dtype="float64"))
    expected, wanted = gradients(model, documents_of(batch), whole)
    across = loss_of(model, batch).item() / whole
    assert abs(across - expected) > 1e-4, "without positions in its masks"
    give_positions_to_masks(model)
    give_positions_to_masks(model)
    loss, found = gradients(model, [batch], whole)
    assert loss == pytest.approx(expected, rel=1e-12)
    largest = max(value.abs().max() for value in wanted.values())
    assert all((found[name] - wanted[name]).abs().max() <= 1e-12 * largest for name in wanted)
    other = initial_model(Recipe("gpt_oss", dtype="float64"))
    assert loss_of(other, batch).item() / whole == across, "another model is as before"


def test_a_causal_lm_gives_positions_to_its_model() -> None:
    batch = packed(3)
    module = CausalLM({"config": {"model_type": "llama"}})
    module.model = model = initial_model(Recipe("llama"))
    expected = sum(
        loss_of(model, document).item() for document in documents_of(batch)
    ) / target_count("llama", batch)
    assert module._loss(batch).item() == pytest.approx(expected, rel=1e-6)


class Packing:
    """A trainer as far as a model that is built asks for it: its data have a document mask."""

    datamodule = SimpleNamespace(document_mask=True)


@pytest.mark.parametrize(
    ("model_type", "attention"), [("gpt_oss", "eager"), ("mistral", "flash_attention_2")]
)
def test_a_causal_lm_tries_its_attention_and_keeps_documents_apart(
    model_type: str, attention: str
) -> None:
    more = {"num_local_experts": 4, "head_dim": 8} if model_type == "gpt_oss" else {}
    module = CausalLM(
        {
            "config": {"model_type": model_type, **TINY, **more, "sliding_window": 4},
            "attn_implementation": "eager",
        }
    )
    module._trainer = Packing()  # type: ignore[assignment]
    batch = packed(3)
    module.model = AutoModelForCausalLM.from_config(module.config, attn_implementation="eager")
    expected = sum(
        loss_of(module.model, document).item() for document in documents_of(batch)
    ) / target_count("llama", batch)
    with fake_flash():
        if attention == "flash_attention_2":
            use_flash(module.model)
        module._keep_documents_apart(module.model)
        assert module._loss(batch).item() == pytest.approx(expected, rel=1e-5)


def test_a_model_without_an_attention_is_refused_with_one_that_works() -> None:
    fields = {"model_type": "gpt_oss", **TINY, "num_local_experts": 4, "head_dim": 8}
    module = CausalLM({"config": fields, "attn_implementation": "sdpa"})
    with pytest.raises(
        ConfigError,
        match=(
            "attn_implementation=sdpa cannot be used here: .* Use model.attn_implementation=eager,"
            " which"
        ),
    ):
        module.configure_model()


def test_documents_stay_apart_where_the_configuration_asks_for_a_cache() -> None:
    """Transformers makes no mask of positions while a cache is in use."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    module = CausalLM({"config": {"model_type": "llama", **sizes, "use_cache": True}})
    module.configure_model()
    batch = packed(3)
    expected = sum(
        loss_of(module.model, document).item() for document in documents_of(batch)
    ) / target_count("llama", batch)
    assert module._loss(batch).item() == pytest.approx(expected, rel=1e-5)


# Layouts


class Documents(parity.Module):
    """A module that keeps documents apart, as `CausalLM` does."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        give_positions_to_masks(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        model: Any = self.model
        return model(**inputs_of(batch, model), labels=batch["labels"]).loss


class Flash(Documents):
    def configure_model(self) -> None:
        super().configure_model()
        use_flash(self.model)  # type: ignore[arg-type]


def fit_packed(recipe: Recipe, flash: bool = False, **strategy: Any) -> parity.Part:
    rows = Rows(packed(recipe.steps * recipe.global_batch))
    if not flash:
        return fit_on_rank(recipe, rows, Documents(recipe), **strategy)
    with fake_flash():
        return fit_on_rank(recipe, rows, Flash(recipe), **strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        pytest.param("llama", "tp2_pp2", {"recompute": "selective"}, id="tp2_pp2 selective"),
        pytest.param("qwen3", "cp2", {"cp_kind": "ring", "recompute": "full"}, id="ring full"),
        pytest.param("mixtral", "cp2", {"cp_kind": "ulysses"}, id="ulysses"),
        pytest.param(
            "gpt_oss", "cp2", {"cp_kind": "ring", "recompute": "full"}, id="sinks ring full"
        ),
        pytest.param("gpt_oss", "tp2", {"recompute": "selective"}, id="sinks tp2"),
        pytest.param("mixtral", "tp2_pp2", {"recompute": "full", "flash": True}, id="flash full"),
        pytest.param(
            "llama", "dp2", {"zero_stage": 0, "flash": True}, id="flash", marks=pytest.mark.full
        ),
        *(
            pytest.param(family, layout, options, marks=pytest.mark.full)
            for family in ("llama", "qwen3", "mixtral", "gpt_oss")
            for layout, options in (
                ("tp2", {}),
                ("tp2", {"sequence_parallel": True, "recompute": "full"}),
                ("pp2", {}),
                ("pp2", {"recompute": "full"}),
                ("cp2", {"cp_kind": "ring"}),
                ("cp2", {"cp_kind": "ulysses", "recompute": "selective"}),
                ("tp2_cp2", {"cp_kind": "ring", "recompute": "selective"}),
                ("pp2_cp2", {"cp_kind": "ulysses"}),
                ("tp2_dp2", {"zero_stage": 0}),
            )
        ),
    ],
)
def test_a_layout_trains_each_document_alone(
    family: str, layout: str, options: dict[str, Any]
) -> None:
    recipe = Recipe(family, dtype="float64", steps=2)
    rows = packed(recipe.steps * recipe.global_batch)
    steps = [{key: value[start : start + 16] for key, value in rows.items()} for start in (0, 16)]
    expected = train_on(recipe, [documents_of(step) for step in steps])
    rows_of_micro_batch = (
        recipe.global_batch // Layout.parse(layout).dp // (2 * Layout.parse(layout).pp)
    )
    parts = run_ranks(
        fit_packed,
        world_size(layout),
        recipe,
        layout=layout,
        micro_batch_size=rows_of_micro_batch,
        timeout=180,
        **options,
    )
    error, drift = parity.differences(parts, expected)
    assert drift == 0.0
    assert error.within(Noise(1e-12, 1e-12, 1e-10)), error


# Models and options


TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
}


def tiny(model_type: str, **more: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **{**TINY, **more})
        )
    return model


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama", {}),
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
        *(
            pytest.param(name, {}, marks=pytest.mark.full)
            for name in ("qwen3", "gemma3_text", "mixtral", "olmo2", "phi3", "cohere2")
        ),
    ],
)
def test_a_model_that_keeps_documents_apart_passes_the_trial(
    model_type: str, more: dict[str, Any]
) -> None:
    before = torch.get_rng_state()
    require_separate_documents(tiny(model_type, **more))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("bloom", {"n_head": 4, "n_layer": 2}),  # positions from the mask (ALiBi)
        pytest.param("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, marks=pytest.mark.full),
        pytest.param("mamba", {"state_size": 4}, marks=pytest.mark.full),
        # its masks get no positions here
        pytest.param("gpt_oss", {"num_local_experts": 4, "head_dim": 8}, marks=pytest.mark.full),
    ],
)
def test_a_model_that_sees_other_documents_is_refused(
    model_type: str, more: dict[str, Any]
) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"data.document_mask=true cannot be used with \w+: its results in a document depend on"
        ),
    ):
        require_separate_documents(tiny(model_type, **more))


def chunks_of_places(*args: Any, **kwargs: Any) -> Any:
    """Mask in which a token sees its chunk of `sliding_window` tokens."""
    size = kwargs["config"].sliding_window
    return create_causal_mask(
        *args,
        **kwargs,
        and_mask_function=lambda batch, head, query, key: query // size == key // size,
    )


def test_a_window_that_does_not_follow_documents_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks begin with the row and not with its documents in older versions of Transformers. These
    are longer than the trial's rows."""
    model = tiny("mistral", sliding_window=4096)
    require_separate_documents(model)
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", chunks_of_places)
    monkeypatch.setattr(
        masking_utils,
        "remap_positions_for_packed_sequence",
        lambda mask, positions: mask,
        raising=False,
    )
    with pytest.raises(
        ConfigError,
        match=(
            "cannot be used with MistralForCausalLM: its results in a document depend on the"
            " other doc"
        ),
    ):
        require_separate_documents(model)


def sparse(index_topk: int, index_heads: int) -> nn.Module:
    """A model of the family of GLM-5 and DeepSeek-V3.2, in which an indexer selects the tokens that
    a query attends to."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "v_head_dim": 8,
    }
    widths = {
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "index_n_heads": index_heads,
        "index_head_dim": 16,
        "index_topk": index_topk,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    }
    config = AutoConfig.for_model(
        "glm_moe_dsa",
        **sizes,
        **heads,
        **widths,
        **experts,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._experts_implementation = "eager"  # grouped products do not know float64
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_sparse_attention_selects_tokens_of_the_document_alone() -> None:
    """Rows of 121 tokens, of which each query selects 8. With 32 heads, no score is the sum of
    ReLUs that are all 0."""
    torch.manual_seed(0)
    model, sizes = sparse(8, 32).double().eval(), (50, 41, 30)
    ids = torch.randint(3, 64, (1, sum(sizes)))
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    with torch.no_grad():
        packed = model(
            **inputs_of({"input_ids": ids, "position_ids": positions}, model), use_cache=False
        ).logits
        alone = torch.cat(
            [
                model(input_ids=document, use_cache=False).logits
                for document in ids.split(sizes, dim=1)
            ],
            dim=1,
        )
        everything = model(input_ids=ids, use_cache=False).logits
    assert (packed - alone).abs().max() <= 1e-12 * alone.abs().max()
    assert (packed - everything)[:, 50:].abs().max() > 1e-3 * alone.abs().max(), "documents matter"


def test_sparse_attention_passes_the_trial_although_tokens_have_equal_scores() -> None:
    """With 2 heads, every fourth token has the score 0, and `topk` would choose among them by the
    length of the row."""
    require_separate_documents(sparse(64, 2))


def test_a_selection_among_tokens_of_all_documents_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An indexer that is causal, but does not know documents. It chooses all 64 in the trial's
    rows."""
    forward = modeling_glm_moe_dsa.GlmMoeDsaIndexer.forward

    def select(
        self: nn.Module,
        hidden: Tensor,
        query: Tensor,
        positions: Any,
        mask: Tensor,
        *more: Any,
        **options: Any,
    ) -> Any:
        causal = torch.full_like(mask, torch.finfo(mask.dtype).min).triu(1)
        return forward(self, hidden, query, positions, causal, *more, **options)

    monkeypatch.setattr(modeling_glm_moe_dsa.GlmMoeDsaIndexer, "forward", select)
    with pytest.raises(
        ConfigError,
        match=(
            "cannot be used with GlmMoeDsaForCausalLM: its results in a document depend on the"
            " other doc"
        ),
    ):
        require_separate_documents(sparse(64, 2))


def test_blocks_of_keys_that_do_not_follow_documents_are_refused() -> None:
    """The indexer of MiniMax-M3 selects blocks of 128 tokens of the row, which are longer than the
    trial's rows."""
    more = {
        "num_hidden_layers": 2,
        "layer_types": ["minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense"] * 2,
        "head_dim": 8,
    }
    rotary = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    }
    model = tiny(
        "minimax_m3_vl_text",
        **more,
        **rotary,
        index_n_heads=2,
        index_head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    with pytest.raises(
        ConfigError,
        match=(
            "cannot be used with MiniMaxM3VLForCausalLM: its results in a document depend on the"
            " other doc"
        ),
    ):
        require_separate_documents(model)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.attn_implementation=paged|eager"],
            r"attn_implementation=paged\|eager, which is not known to keep documents apart",
        ),
        (
            ["+model.config.rope_parameters={rope_type:dynamic,factor:2.0}"],
            r"its rotary positions \(rope_type dynamic\) depend on",
        ),
    ],
)
def test_what_the_configuration_shows_is_refused_before_ranks_are_started(
    overrides: list[str], message: str
) -> None:
    common = ["data.document_mask=true", "model=llama_tiny", "cluster.accelerator=cpu"]
    with pytest.raises(ConfigError, match=f"data.document_mask=true .*{message}"):
        plan_run(composed(*common, *overrides))
    plan_run(composed(*common))


def test_layers_with_a_state_are_refused_and_not_what_context_parallelism_replaces() -> None:
    with pytest.raises(
        ConfigError,
        match="cannot be used with qwen3_next: its linear_attention layers carry a state",
    ):
        check_documents(
            "qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}.get, None, 1
        )
    check_documents("llama", {}.get, "flash_attention_3", cp=2)


def test_files_without_a_separator_are_refused_before_ranks_are_started(tmp_path: Path) -> None:
    write_tokens(tmp_path / "x.bin", np.arange(100, dtype=np.uint16), vocab_size=200)
    path = str(tmp_path / "x.bin")
    tokens = {"name": "tokens", "train_path": path}
    blend = {
        "name": "blend",
        "sequence_length": 8,
        "sources": {"x": {"train_path": path, "weight": 1}},
    }
    for config in (tokens, blend):
        check_files(config)
        with pytest.raises(
            ConfigError,
            match=(
                "data.document_mask=true needs the token that ends a document, and .* Set"
                " data.document"
            ),
        ):
            check_files({**config, "document_mask": True})
        with pytest.raises(
            ConfigError, match="data.predict_across_documents=false needs the token"
        ):
            check_files({**config, "predict_across_documents": False})
    check_files({**tokens, "document_mask": True, "document_separator": 3})


# The command


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_blend_with_a_mask_resumes_in_its_middle(tmp_path: Path) -> None:
    for seed, name in enumerate(("web", "code")):
        write_tokens(
            tmp_path / f"{name}.bin",
            np.asarray(tokens_of(60, seed).values),
            vocab_size=64,
            document_separator=END,
        )
    sources = f"{{web:{{train_path:{tmp_path}/web.bin,weight:2}},code:{{train_path:{tmp_path}/code.bin,weight:1}}}}"  # noqa: E501
    job = [
        "data=blend",
        f"data.sources={sources}",
        f"data.sequence_length={LENGTH}",
        "data.global_batch_size=8",
        "data.num_workers=0",
    ]
    job += [
        "data.document_mask=true",
        "trainer.max_steps=4",
        "trainer.val_check_interval=2",
        "trainer.checkpoint_every_n_steps=2",
    ]
    job += ["model=llama_tiny"]
    resume = f"trainer.resume={tmp_path}/a/checkpoints/step_2.ckpt"
    lines = [
        ["train", *job, "parallelism=dp2", f"hydra.run.dir={tmp_path}/a"],
        ["train", *job, "parallelism=dp2", resume, f"hydra.run.dir={tmp_path}/b"],
        ["train", *job, "parallelism=tp2", resume, f"hydra.run.dir={tmp_path}/c"],
        [
            "train",
            *job,
            "parallelism=dp2",
            "data.document_mask=false",
            f"hydra.run.dir={tmp_path}/d",
        ],
    ]
    ended = run_commands(lines, timeout=850, warm=True)
    assert [one.code for one in ended] == [0, 0, 0, 0], "".join(one.output for one in ended)
    whole, same, other, across = (steps_of(tmp_path / name / "metrics.csv") for name in "abcd")
    assert same == {step: whole[step] for step in ("3", "4")}, "bit by bit on the same layout"
    for step in ("3", "4"):
        assert [float(value) for value in other[step]] == pytest.approx(
            [float(value) for value in whole[step]], rel=1e-5
        )
    assert across["1"] != whole["1"]


def steps_of(path: Path) -> dict[str, list[str]]:
    """Loss and gradient norm of each step, as they were written."""
    lines = [line.split(",") for line in path.read_text().splitlines()[1:]]
    return {line[0]: line[1:3] for line in lines}
