"""Pretrained weights: what ranks read from safetensors equals what Transformers' own
`from_pretrained` loads, bit for bit.

`pytest` loads every family on some layouts; `pytest -m full` each on all of them.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import parity
import pytest
import torch
import transformers
from parity import Part, Rows, fit_on_rank
from peft import LoraConfig, get_peft_model
from pretrained_folders import (
    UNTRAINED,
    Loaded,
    by_transformers,
    keep_only_a_pickle,
    lose_the_weights,
    rewritten,
    saved,
)
from ranks import run_ranks
from reference import Recipe, data, one_thread
from safetensors.torch import load_file, save_file
from sweeps import by_default
from torch import Tensor, nn
from transformers import conversion_mapping
from transformers.core_model_loading import PermuteForRope, WeightConverter

from lightning_3d import initialize, load_pretrained
from lightning_3d.app.training.module import CausalLM
from lightning_3d.errors import CheckpointError, ConfigError, Lightning3DError
from lightning_3d.models.pretrained_config import TAKEN, architecture, complete_model
from lightning_3d.models.safetensors_folder import read_tensors
from lightning_3d.weights import stored as module_under_test


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: saved(family, tmp_path_factory.mktemp(family))
        for family in (*models.FAMILIES, *models.MIXTURES)
    }


@pytest.fixture
def llama(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(folders["llama"], tmp_path / "llama"))


def on_meta(family: str, dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        return models.build(family).to(dtype)


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    own, theirs = model.state_dict(), expected.state_dict()
    assert own.keys() == theirs.keys()
    for name, value in theirs.items():
        assert own[name].dtype == value.dtype and torch.equal(own[name], value), name


# On ranks


@contextlib.contextmanager
def bytes_read() -> Iterator[list[int]]:
    """Bytes of each slice that is read meanwhile."""
    read: list[int] = []
    original = module_under_test.safe_open

    class Slice:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getitem__(self, index: Any) -> Tensor:
            part = self.inner[index]
            read.append(part.numel() * part.element_size())
            return part

    class File:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.inner = original(*args, **kwargs)

        def get_slice(self, name: str) -> Slice:
            return Slice(self.inner.get_slice(name))

    module_under_test.safe_open = File  # type: ignore[assignment, misc]
    try:
        yield read
    finally:
        module_under_test.safe_open = original  # type: ignore[misc]


def load_on_rank(
    recipe: Recipe, folder: Path, lora: dict[str, Any] | None = None, **strategy: Any
) -> tuple[Part, list[int]]:
    with bytes_read() as read:
        part = fit_on_rank(recipe, Rows(data(recipe)), Loaded(recipe, folder, lora), **strategy)
    return part, read


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_pp2": (4, {"micro_batch_size": 4}),
    "tp4": (4, {"micro_batch_size": 8}),
    "dp2 zero3": (2, {"layout": "dp2", "zero_stage": 3}),
    "pp2_vp2": (2, {"schedule": "Interleaved1F1B", "micro_batch_size": 4}),
    "tp2_ep4_dp2": (4, {"micro_batch_size": 4}),
    "pp2_ep2_dp2 zero1": (4, {"layout": "pp2_ep2_dp2", "zero_stage": 1, "micro_batch_size": 4}),
}
DENSE = [layout for layout in LAYOUTS if "ep" not in layout]
CELLS = [
    (family, layout)
    for family in models.FAMILIES
    for layout in DENSE
    if (family, layout) != ("gemma3", "tp4")
]
CELLS += [
    (family, layout)
    for family in models.MIXTURES
    for layout in LAYOUTS
    if family != "gpt_oss" or "tp" not in layout
]
CHOSEN = {
    ("llama", "tp2_pp2"),
    ("llama", "tp4"),  # fewer key heads than ranks; a vocabulary that they do not divide
    ("qwen2", "tp2_pp2"),  # tied, on both stages
    ("qwen2", "dp2 zero3"),
    ("gemma3", "pp2_vp2"),
    ("phi3", "tp4"),  # packed
    ("gpt_neox", "tp2_pp2"),
    ("mixtral", "tp2_ep4_dp2"),
    ("qwen3_moe", "tp2_pp2"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"), by_default(CELLS, *(CELLS.index(cell) for cell in sorted(CHOSEN)))
)
def test_weights_and_first_loss(family: str, layout: str, folders: dict[str, Path]) -> None:
    """A step with a learning rate of 0 leaves the weights as they were read."""
    recipe = Recipe(family, **UNTRAINED)
    count, strategy = LAYOUTS[layout]
    results = run_ranks(
        load_on_rank, count, recipe, folders[family], **{"layout": layout, **strategy}
    )
    parts = [part for part, _ in results]
    weights, drift = parity.assemble(parts)
    assert drift == 0.0
    expected = by_transformers(folders[family])
    for name, parameter in expected.named_parameters():
        assert torch.equal(weights.pop(f"model.{name}"), parameter), name
    assert not weights
    with one_thread(), torch.no_grad():
        loss = models.causal_token_losses(expected, data(recipe)).mean().item()
    assert [part.losses[0] for part in parts] == pytest.approx([loss] * count, rel=1e-5)
    buffers = (
        expected.state_dict().keys()
        - dict(expected.named_parameters(remove_duplicate=False)).keys()
    )
    if "zero" not in layout and not buffers:
        for part, read in results:
            held = sum(value.numel() * value.element_size() for value in part.weights.values())
            assert sum(read) == held, "a rank reads what it holds, once"


ADAPTERS = {"r": 4, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}


@pytest.mark.slow
def test_adapters_around_pretrained_weights(folders: dict[str, Path]) -> None:
    """The weights inside are the file's, a copy in `modules_to_save` too; a new adapter adds
    nothing to the first loss."""
    recipe = Recipe("llama", **UNTRAINED)
    results = run_ranks(
        load_on_rank, 4, recipe, folders["llama"], ADAPTERS, layout="tp2_pp2", micro_batch_size=4
    )
    weights, drift = parity.assemble([part for part, _ in results])
    assert drift == 0.0
    expected = by_transformers(folders["llama"])
    with one_thread(), torch.no_grad():
        loss = models.causal_token_losses(expected, data(recipe)).mean().item()
    assert results[0][0].losses[0] == pytest.approx(loss, rel=1e-5)
    adapted = get_peft_model(expected, LoraConfig(**ADAPTERS))
    seen = 0
    for name, parameter in adapted.named_parameters():
        if "lora_" not in name:
            assert torch.equal(weights[f"model.{name}"], parameter), name
            seen += 1
    assert seen == len(by_transformers(folders["llama"]).state_dict()) + 1
    assert {name.removeprefix("model.") for name in weights} == {
        name for name, _ in adapted.named_parameters()
    }


# On one process


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_types(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path, stored)
    model = load_pretrained(on_meta("llama", wanted), folder)
    initialize(model)
    assert_equal(model, by_transformers(folder, wanted))


def test_a_model_in_memory_is_overwritten_at_once(folders: dict[str, Path]) -> None:
    assert_equal(
        load_pretrained(models.build("qwen2"), folders["qwen2"]), by_transformers(folders["qwen2"])
    )


@pytest.mark.parametrize("around", [False, True])
def test_adapters_before_or_after(around: bool, folders: dict[str, Path]) -> None:
    with torch.device("meta"):
        model: Any = get_peft_model(
            models.build("llama"), LoraConfig(r=2, target_modules="all-linear")
        )  # type: ignore[arg-type]
    load_pretrained(model if around else model.get_base_model(), folders["llama"])
    initialize(model)
    assert_equal(model.unload(), by_transformers(folders["llama"]))


@pytest.mark.parametrize(
    ("family", "rename"),
    [
        ("qwen2", lambda name: name.removeprefix("model.")),  # of the bare model
        # of an older version of Transformers
        ("gpt_neox", lambda name: name.replace("lm_head.", "embed_out.")),
        ("gpt_neox", lambda name: name.removeprefix("gpt_neox.")),
    ],
)
def test_other_names(family: str, rename: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = rewritten(folders[family], tmp_path / "other", rename)
    model = load_pretrained(on_meta(family), folder)
    initialize(model)
    assert_equal(model, by_transformers(folder))
    assert_equal(model, by_transformers(folders[family]))


def test_buffers_of_older_versions_are_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = rewritten(folders["llama"], tmp_path / "older", lambda name: name)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(4)
    }
    save_file(tensors, folder / "model.safetensors")
    model = load_pretrained(on_meta("llama"), folder)
    initialize(model)
    assert_equal(model, by_transformers(folders["llama"]))


def test_not_strict(folders: dict[str, Path], tmp_path: Path) -> None:
    """What is missing is drawn from the seed, as without pretrained weights."""
    folder = rewritten(
        folders["llama"], tmp_path / "part", lambda name: name.replace("model.norm", "model.nrom")
    )
    model, new = load_pretrained(on_meta("llama"), folder, strict=False), on_meta("llama")
    initialize(model, 3), initialize(new, 3)
    expected = by_transformers(folders["llama"]).state_dict() | {
        "model.norm.weight": new.state_dict()["model.norm.weight"]
    }
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


class Counter(nn.Module):
    """A module of the user's own, with a buffer that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.tensor(5))


def test_a_module_of_the_users_own(tmp_path: Path) -> None:
    original = Counter()
    original.seen += 7
    save_file(original.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.ModuleDict({"inner": load_pretrained(Counter(), tmp_path)})
    initialize(model)
    assert_equal(model["inner"], original)


def test_a_tied_parameter_that_is_stored_twice(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = rewritten(folders["qwen2"], tmp_path / "twice", lambda name: name)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    model = load_pretrained(on_meta("qwen2"), folder)
    initialize(model)
    assert_equal(model, by_transformers(folders["qwen2"]))
    tensors["lm_head.weight"][3, 2] += 1
    save_file(tensors, folder / "model.safetensors")
    model = load_pretrained(on_meta("qwen2"), folder)
    with pytest.raises(
        CheckpointError,
        match="'lm_head.weight' have different values.*tie_word_embeddings to false",
    ):
        initialize(model)


# What cannot be


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def truncate(folder: Path) -> None:
    file = first_file(folder)
    file.write_bytes(file.read_bytes()[:-100])


def scramble(folder: Path) -> None:
    file = first_file(folder)
    file.write_bytes(file.read_bytes()[:8] + b"x" * 5000)


def lose_a_file(folder: Path) -> None:
    first_file(folder).unlink()


def point(folder: Path) -> None:
    first_file(folder).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\n")


def misplace(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    entries["weight_map"]["model.layers.9.gone"] = first_file(folder).name
    index.write_text(json.dumps(entries))


SPOILED: dict[str, tuple[Any, str]] = {
    "truncated": (
        truncate,
        (
            r"00001-of-\d+.safetensors is truncated or damaged: its header describes \d+ bytes, but"
            r" the file has \d+"
        ),
    ),
    "scrambled": (scramble, "00001-of-.*is truncated or damaged"),
    "file": (
        lose_a_file,
        r"lacks 1 of the \d+ files that model.safetensors.index.json names: .*00001-of",
    ),
    "weights": (
        lose_the_weights,
        "has neither model.safetensors nor model.safetensors.index.json. It contains config.json",
    ),
    "pickle": (
        keep_only_a_pickle,
        "pytorch_model.bin is a pickle.*so it is not loaded.*save_pretrained",
    ),
    "lfs": (point, "Git LFS pointer.*git lfs pull"),
    "tensor": (misplace, "lists 1 tensor that its files lack: 'model.layers.9.gone'"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_spoiled_folders(how: str, llama: Path) -> None:
    spoil, message = SPOILED[how]
    spoil(llama)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(on_meta("llama"), llama)
    with pytest.raises(CheckpointError, match=message):
        complete_model({"name": "pretrained", "pretrained": str(llama)})


def test_names_and_shapes_of_another_model(folders: dict[str, Path], tmp_path: Path) -> None:
    missing = rewritten(
        folders["llama"], tmp_path / "missing", lambda name: None if "lm_head" in name else name
    )
    with pytest.raises(
        CheckpointError, match=r"1 that the model has and the files lack \(lm_head.weight\)"
    ):
        load_pretrained(on_meta("llama"), missing)
    both = (
        r"1 that the model has and the files lack \(model.layers.1.q\).*3 that the files have and"
        r" the model lacks"
    )
    with pytest.raises(CheckpointError, match=both):
        other = rewritten(folders["llama"], tmp_path / "other", lambda name: name)
        model = on_meta("llama")
        model.model.layers[1].q, model.model.layers[1].mlp = (
            nn.Parameter(torch.empty(2, device="meta")),
            None,
        )
        load_pretrained(model, other)
    with pytest.raises(
        ConfigError,
        match=r"in shape from those stored in .*: lm_head.weight \[64, 32\], stored \[67, 32\]",
    ):
        model = on_meta("llama")
        model.lm_head = nn.Linear(32, 64, bias=False, device="meta")
        load_pretrained(model, folders["llama"])


def test_integers_are_not_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = rewritten(folders["llama"], tmp_path / "quantized", lambda name: name)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="'lm_head.weight' is stored as I8.*before it was quantized"
    ):
        load_pretrained(on_meta("llama"), folder)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_are_read_one_by_one_or_as_one(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Transformers saves each expert by itself; a checkpoint that keeps them in one tensor is the
    same."""
    expected = by_transformers(folders[family])
    expected.save_pretrained(tmp_path, save_original_format=False)
    assert any(".experts.0." in name for name in read_tensors(folders[family]))
    assert not any(".experts.0." in name for name in read_tensors(tmp_path))
    for folder in (folders[family], tmp_path):
        model = load_pretrained(on_meta(family), folder)
        initialize(model, seed=1)
        assert_equal(model, expected)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (
            "experts.3.w1",
            (
                r"lack some parts of '.*experts.gate_up_proj': they have 7 of .*w1.weight, 8 of"
                r" .*w3.weight"
            ),
        ),
        ("experts.3.w2", r"experts.down_proj \[8, 32, 64\], stored \[7, 32, 64\]"),
        ("experts.", r"the model has and the files lack .*experts.gate_up_proj"),
    ],
)
def test_a_missing_expert_is_found(
    folders: dict[str, Path], tmp_path: Path, lost: str, message: str
) -> None:
    folder = rewritten(
        folders["mixtral"],
        tmp_path / "lost",
        lambda name: None if f"layers.1.block_sparse_moe.{lost}" in name else name,
    )
    assert any(
        f"layers.1.block_sparse_moe.{lost}" in name for name in read_tensors(folders["mixtral"])
    )
    with pytest.raises(Lightning3DError, match=message):
        load_pretrained(on_meta("mixtral"), folder)


def test_what_has_to_be_computed_is_refused_by_name(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family of which Transformers permutes what is stored."""
    other = [WeightConverter("q_proj.weight", "q_proj.weight", operations=[PermuteForRope()])]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: other)
    with pytest.raises(
        CheckpointError, match=r"q_proj.*PermuteForRope.*save_original_format=False"
    ):
        load_pretrained(on_meta("llama"), folders["llama"])


def test_a_name_of_the_hub_is_looked_up_in_the_cache(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError, match="There is no folder some/llama.*hf download some/llama"
    ):
        load_pretrained(on_meta("llama"), "some/llama")
    repository = tmp_path / "models--some--llama"
    shutil.copytree(folders["llama"], repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    model = load_pretrained(on_meta("llama"), "some/llama")
    initialize(model)
    assert_equal(model, by_transformers(folders["llama"]))


# By configuration


def test_the_architecture_is_the_folders(folders: dict[str, Path]) -> None:
    model, _ = complete_model(
        {
            "name": "pretrained",
            "config": {"attention_dropout": 0.1},
            "pretrained": str(folders["phi3"]),
        }
    )
    config = transformers.AutoConfig.for_model(**model["config"])
    expected = transformers.AutoConfig.from_pretrained(folders["phi3"])
    expected.attention_dropout = 0.1
    ours, theirs = config.to_dict(), expected.to_dict()
    for field in ("architectures", "dtype", "transformers_version", "_name_or_path", "use_cache"):
        ours.pop(field, None), theirs.pop(field, None)
    assert ours == theirs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"intermediate_size": 96},
            (
                r"12 parameters differ: .*gate_proj.weight has shape \[96, 32\] \(\[64, 32\] in the"
                r" folder\)"
            ),
        ),
        (
            {"num_hidden_layers": 3},
            "9 parameters differ: model.layers.3.self_attn.q_proj.weight is only in the folder",
        ),
        ({"hidden_act": "gelu"}, r"hidden_act is gelu \(silu in the folder\)"),
        (
            {"rope_parameters": {"rope_theta": 5e5}},
            r"rope rope_theta is 500000.0 \(10000.0 in the folder\)",
        ),
        ({"model_type": "mistral"}, r"model_type is mistral \(llama in the folder\)"),
    ],
    ids=str,
)
def test_another_architecture_is_refused(
    change: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    config = architecture(folders["llama"])
    assert (
        complete_model({"name": "mine", "config": config, "pretrained": str(folders["llama"])})[0][
            "config"
        ]
        == config
    )
    with pytest.raises(ConfigError, match=message + ".*model=pretrained"):
        complete_model(
            {"name": "mine", "config": config | change, "pretrained": str(folders["llama"])}
        )


def test_other_attention_windows_are_refused(folders: dict[str, Path]) -> None:
    config = architecture(folders["mistral"])
    complete_model({"name": "mine", "config": config, "pretrained": str(folders["mistral"])})
    with pytest.raises(ConfigError, match="attention windows"):
        complete_model(
            {
                "name": "mine",
                "config": config | {"sliding_window": None},
                "pretrained": str(folders["mistral"]),
            }
        )


def test_rope_in_the_words_of_older_versions(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config.pop("rope_parameters", None)
    (llama / "config.json").write_text(
        json.dumps(config | {"rope_theta": 5e5, "rope_scaling": rope})
    )
    mine = {
        "name": "mine",
        "config": config | {"rope_parameters": {"rope_theta": 500000, **rope}},
        "pretrained": str(llama),
    }
    complete_model(mine)
    mine["config"]["rope_parameters"]["factor"] = 4.0
    with pytest.raises(Lightning3DError, match=r"rope factor is 4.0 \(8.0 in the folder\)"):
        complete_model(mine)


def test_yarn_extends_the_positions_of_pretrained_weights(llama: Path) -> None:
    """With the base of the weights, and from a length that they know."""
    config = json.loads((llama / "config.json").read_text())
    known = config["max_position_embeddings"]
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": known,
    }
    mine = {"name": "mine", "pretrained": str(llama)}
    changed = config | {"max_position_embeddings": 4 * known, "rope_parameters": rope}
    assert complete_model(mine | {"config": changed})[0]["config"]["rope_parameters"] == rope
    for change in ({"rope_theta": 20000.0}, {"original_max_position_embeddings": 2 * known}):
        with pytest.raises(
            Lightning3DError,
            match=r"rope rope_type is yarn \(default in the folder\)|rope rope_theta is 20000",
        ):
            complete_model(mine | {"config": changed | {"rope_parameters": rope | change}})


@pytest.mark.parametrize("name", ["pretrained", "mine"])
def test_notes_in_a_config_json_are_no_mistakes_of_the_user(name: str, llama: Path) -> None:
    """Who fine-tunes and uploads models writes fields of his own there, which `from_pretrained`
    passes over."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(
        json.dumps(config | {"unsloth_fixed": True, "temperature": 0.6})
    )
    model = {
        "name": name,
        "config": {} if name == "pretrained" else config,
        "pretrained": str(llama),
    }
    assert CausalLM(complete_model(model)[0]).config.hidden_size == config["hidden_size"]
    with pytest.raises(ConfigError, match="no field 'atention_dropout'.*attention_dropout"):
        CausalLM(
            complete_model({**model, "config": {**model["config"], "atention_dropout": 0.1}})[0]
        )


def test_fields_in_a_folder_that_nobody_reads_are_left_alone(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"unsloth_version": "2026.1"}))
    model, _ = complete_model({"name": TAKEN, "pretrained": str(llama)})
    assert CausalLM(model).config.hidden_size == config["hidden_size"]
    misspelt = {**model, "config": {**model["config"], "hiden_size": 8}}
    with pytest.raises(ConfigError, match="no field 'hiden_size'"):
        CausalLM(misspelt)
