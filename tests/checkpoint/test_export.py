"""Checkpoints in the format of Transformers: what Transformers saved, loaded on ranks and exported
again, is the same bit for bit."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import peft
import pytest
import torch
import transformers
from conversations import a_tokenizer
from lightning.pytorch import Trainer
from parity import Rows
from pretrained_folders import UNTRAINED, Loaded, saved
from ranks import run_ranks
from reference import Recipe, data
from safetensors.torch import load_file
from sweeps import by_default
from torch.utils.data import DataLoader
from transformers import conversion_mapping

from lightning_3d import Lightning3DStrategy
from lightning_3d.app.cli.export import run as command
from lightning_3d.app.cli.inspect import run as inspect
from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.checkpoint.huggingface import export
from lightning_3d.errors import CheckpointError, ConfigError

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt_neox", *models.MIXTURES]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_pp2": {"micro_batch_size": 4},
    "dp4": {"zero_stage": 3},
    "pp2_dp2": {"zero_stage": 1, "micro_batch_size": 4},
}
CELLS = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if (family, layout) != ("gpt_oss", "tp2_pp2")
]
CHOSEN = [
    ("llama", "tp2_pp2"),
    ("qwen3", "pp2_dp2"),
    ("mixtral", "tp2_pp2"),
    ("deepseek_v3", "dp4"),
]


def save_on_rank(
    recipe: Recipe, pretrained: Path, checkpoint: Path, layout: str, **strategy: Any
) -> None:
    """One step that changes nothing, and a checkpoint."""
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=Lightning3DStrategy(layout, **strategy),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Loaded(recipe, pretrained), DataLoader(Rows(data(recipe)), batch_size=8))
    trainer.save_checkpoint(checkpoint)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What Transformers saved, and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("llama")
    pretrained = saved("llama", folder / "pretrained")
    run_ranks(
        save_on_rank,
        4,
        Recipe("llama", **UNTRAINED),
        pretrained,
        folder / "checkpoint",
        layout="tp2_pp2",
        micro_batch_size=4,
    )
    return pretrained, folder / "checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"), by_default(CELLS, *(CELLS.index(cell) for cell in CHOSEN))
)
def test_what_was_loaded_is_exported(family: str, layout: str, tmp_path: Path) -> None:
    pretrained = saved(family, tmp_path / "pretrained")
    recipe = Recipe(family, **UNTRAINED)
    run_ranks(
        save_on_rank,
        4,
        recipe,
        pretrained,
        tmp_path / "checkpoint",
        layout=layout,
        **LAYOUTS[layout],
    )
    export(tmp_path / "checkpoint", tmp_path / "exported", max_shard_size="20KB")
    assert_same_weights(tmp_path / "exported", pretrained)
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights_of(pretrained).keys()
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(
            load(tmp_path / "exported")(tokens).logits, load(pretrained)(tokens).logits
        )
    configs = [
        transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict()
        for name in ("exported", "pretrained")
    ]
    assert [config.pop("_name_or_path") for config in configs] and configs[0] == configs[1]


def test_one_file_another_type_and_a_tokenizer(
    llama: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_tokenizer(tmp_path / "tokenizer", None)
    output = tmp_path / "out"
    words = [str(llama[1]), "--to", "huggingface", "--output", str(output), "--dtype", "bfloat16"]
    assert command([*words, "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    assert "1 file, with its tokenizer" in capsys.readouterr().out
    assert (output / "model.safetensors").is_file() and not (
        output / "model.safetensors.index.json"
    ).exists()
    for name, value in weights_of(llama[0]).items():
        assert torch.equal(weights_of(output)[name], value.bfloat16())
    model = transformers.AutoModelForCausalLM.from_pretrained(output)
    assert model.dtype == torch.bfloat16
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert tokenizer("a b")["input_ids"] == expected("a b")["input_ids"]


def test_the_time_grows_with_the_tensors_only(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers goes through all modules of a model for its renames: that is done once, not once
    for each tensor."""
    calls = []
    ask = conversion_mapping.get_model_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_model_conversion_mapping",
        lambda *given, **more: calls.append(1) or ask(*given, **more),
    )
    assert export(llama[1], tmp_path / "out").tensors > 10
    assert len(calls) == 1


def test_refusals(
    llama: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases = [
        ([str(tmp_path / "nothing")], "There is no checkpoint at"),
        ([str(llama[1]), "--output", str(tmp_path / "full")], "already exists and is not empty"),
        (
            [str(llama[1]), "--output", str(tmp_path / "x"), "--module", "modle"],
            'no model "modle". Did you mean "model"',
        ),
        (
            [str(llama[1]), "--output", str(tmp_path / "x"), "--tokenizer", str(tmp_path / "full")],
            "contains no tokenizer files",
        ),
        (
            [str(llama[1]), "--output", str(tmp_path / "x"), "--tokenizer", str(tmp_path / "none")],
            "there is no folder",
        ),
        (
            [str(llama[1]), "--output", str(tmp_path / "x"), "--max-shard-size", "5 apples"],
            "max-shard-size",
        ),
        (
            [str(llama[1]), "--dtype", "int4"],
            "--dtype must be bfloat16, float16, float32 or float64",
        ),
        (
            [str(llama[1]), "--output", str(tmp_path / "x"), "--merge"],
            "has no PEFT adapters, so there is nothing to merge",
        ),
    ]
    for words, message in cases:
        assert command(words) == 2, words
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_a_model_that_is_none_of_transformers(llama: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama[1], tmp_path / "other"))
    manifest = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, manifest | {"transformers": {}})
    with pytest.raises(CheckpointError, match="no Transformers model"):
        export(folder, tmp_path / "out")
    two = {"model": manifest["transformers"]["model"], "other": manifest["transformers"]["model"]}
    write_manifest(folder, manifest | {"transformers": two})
    with pytest.raises(ConfigError, match=r"several models: model and other.*--module"):
        export(folder, tmp_path / "out")


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """With the hash of its own that it would have been written with."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    own = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(rest | {"sha256": own}))


def test_inspect(
    llama: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect([str(llama[1])]) == 0
    shown = capsys.readouterr().out
    numbers = sum(value.numel() for value in weights_of(llama[0]).values())
    for words in (
        "step        1, epoch 1",
        "tp2_pp2, 1F1B, ZeRO-0",
        "LlamaForCausalLM (model)",
        f"{numbers:,} numbers",
        "complete    yes",
    ):
        assert words in shown
    assert inspect([str(llama[1]), "--tensors"]) == 0
    listed = capsys.readouterr().out
    for name, value in weights_of(llama[0]).items():
        assert f"model.{name} " in listed and str(list(value.shape)) in listed
    folder = Path(shutil.copytree(llama[1], tmp_path / "damaged"))
    shard = next(folder.glob("*.distcp"))
    contents = shard.read_bytes()
    shard.write_bytes(contents[:-9] + bytes([contents[-9] ^ 1]) + contents[-8:])
    assert inspect([str(folder), "--no-verify"]) == 0
    assert "every file has the recorded size" in capsys.readouterr().out
    assert inspect([str(folder)]) == 2
    assert f"{shard.name} has changed since it was saved" in capsys.readouterr().err
    shard.write_bytes(contents[:-10])
    assert inspect([str(folder)]) == 2
    assert shard.name in capsys.readouterr().err


ADAPTERS: list[tuple[str, str, dict[str, Any]]] = [
    # some layers have biases
    (
        "qwen2",
        "tp2_pp2",
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "modules_to_save": ["norm"]},
    ),
    ("llama", "dp4", {"target_modules": "all-linear"}),
    ("phi3", "tp2_pp2", {"target_modules": "all-linear"}),
    (
        "llama",
        "pp2_dp2",
        {"target_modules": ["q_proj", "o_proj"], "bias": "all", "modules_to_save": ["lm_head"]},
    ),
    ("gpt_neox", "pp2_dp2", {"target_modules": "all-linear", "lora_bias": True}),
]


class Adapted(Loaded):
    """As a script that trains adapters only."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-2
        )


def train_adapters(
    recipe: Recipe,
    pretrained: Path,
    lora: dict[str, Any],
    checkpoint: Path,
    layout: str,
    **strategy: Any,
) -> None:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=Lightning3DStrategy(layout, **strategy),
        max_steps=2,
        **quiet,
    )
    trainer.fit(Adapted(recipe, pretrained, lora), DataLoader(Rows(data(recipe)), batch_size=8))
    trainer.save_checkpoint(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "lora"), by_default(ADAPTERS, 0), ids=str)
def test_adapters_are_exported_alone_and_merged(
    family: str, layout: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    """PEFT on one process, with the checkpoint's weights, says what they are: the adapter's file
    and the merged model, bit for bit."""
    pretrained, checkpoint, recipe = (
        saved(family, tmp_path / "pretrained"),
        tmp_path / "checkpoint",
        Recipe(family, **UNTRAINED),
    )
    lora = {"r": 4, "init_lora_weights": False, **lora}
    run_ranks(
        train_adapters, 4, recipe, pretrained, lora, checkpoint, layout=layout, **LAYOUTS[layout]
    )
    alone = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(pretrained), peft.LoraConfig(**lora)
    )
    state = {
        name.removeprefix("model."): tensor
        for name, tensor in load_full_state_dict(checkpoint).items()
    }
    alone.load_state_dict(state)
    alone.eval().save_pretrained(tmp_path / "expected")

    assert command([str(checkpoint), "--output", str(tmp_path / "adapters")]) == 0
    assert_same_weights(tmp_path / "adapters", tmp_path / "expected")
    configs = [
        json.loads((tmp_path / name / "adapter_config.json").read_text())
        for name in ("adapters", "expected")
    ]
    for config in configs:
        # sets, in any order
        config |= {key: sorted(value) for key, value in config.items() if isinstance(value, list)}
        config.pop("base_model_name_or_path")  # only `from_pretrained` tells a model
    assert configs[0] == configs[1]
    base = transformers.AutoModelForCausalLM.from_pretrained(pretrained)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    tokens = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        expected = alone(tokens).logits
        assert torch.equal(loaded.eval()(tokens).logits, expected)
        with loaded.disable_adapter():
            assert not torch.allclose(loaded(tokens).logits, expected), "the adapters do something"

    assert (
        command(
            [
                str(checkpoint),
                "--merge",
                "--output",
                str(tmp_path / "merged"),
                "--max-shard-size",
                "20KB",
            ]
        )
        == 0
    )
    alone.merge_and_unload().save_pretrained(tmp_path / "whole")
    assert_same_weights(tmp_path / "merged", tmp_path / "whole")
    with torch.no_grad():
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(
            tokens
        ).logits
    torch.testing.assert_close(merged, expected)


@pytest.mark.full
def test_no_more_than_a_few_tensors_are_in_memory(tmp_path: Path) -> None:
    """A model of 1.2 GB, whose largest tensor has 131 MB, is exported by a process that may have
    600 MB beside its libraries."""
    script = tmp_path / "script.py"
    script.write_text(_LARGE.format(folder=tmp_path))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = (int(word) for word in done.stdout.split()[-2:])
    assert (after - before) * 1024 < 600e6


_LARGE = """
import resource, torch, transformers
from pathlib import Path
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from lightning_3d import Lightning3DStrategy
import subprocess, sys
folder = Path("{folder}")
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "save"], check=True)
    from lightning_3d.checkpoint.huggingface import export
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export(folder / "checkpoint", folder / "out", max_shard_size="300MB")
    print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    raise SystemExit
class Module(LightningModule):
    def configure_model(self):
        config = transformers.LlamaConfig(vocab_size=16000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=5,
            num_attention_heads=16, num_key_value_heads=4)
        self.model = transformers.LlamaForCausalLM(config)
    def training_step(self, batch): return self.model(batch, labels=batch).loss
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.0)
trainer = Trainer(accelerator="cpu", devices=1, strategy=Lightning3DStrategy(), max_steps=1, logger=False, enable_checkpointing=False)
trainer.fit(Module(), DataLoader(torch.ones(1, 8, dtype=torch.long)))
trainer.save_checkpoint(folder / "checkpoint", weights_only=True)
"""  # noqa: E501
