"""Pretrained weights from the command line: what is refused and when, and what runs."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from command_line import Result, assert_refused, run_commands
from conversations import TEMPLATE, a_tokenizer, write
from pretrained_folders import by_transformers, keep_only_a_pickle, rewritten

from lightning_3d.checkpoint import load_full_state_dict

pytestmark = pytest.mark.slow

BYTES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
QUICK = [
    "parallelism.micro_batch_size=2",
    "trainer.max_steps=1",
    "data.sequence_length=32",
    "data.global_batch_size=4",
]
QUICK += ["data.val_sequences=4", "optimizer.scheduler=null"]
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "no_path": (["model=pretrained"], ["Set model.pretrained=PATH"]),
    "no_folder": (
        ["model=pretrained", "model.pretrained=/no/such"],
        ["There is no folder /no/such"],
    ),
    "hub": (["model.pretrained=meta-llama/Llama-3.1-8B"], ["hf download meta-llama/Llama-3.1-8B"]),
    "another": (
        ["model=llama_tiny", "model.pretrained={}"],
        ["not those of model=llama_tiny", "parameters differ", "model=pretrained"],
    ),
    "pickle": (
        ["model=pretrained", "model.pretrained={}/pickle"],
        ["pytorch_model.bin is a pickle"],
    ),
    "no_config": (
        ["model=pretrained", "model.pretrained={}/empty"],
        ["has no config.json", "It is empty"],
    ),
    "shape": (
        ["model=pretrained", "model.pretrained={}", "+model.config.intermediate_size=72"],
        ["gate_proj.weight [72, 32], stored [64, 32]"],
    ),
    "lora_key": (["+model.lora.target_module=4"], ['Did you mean "model.lora.target_modules"']),
    "lora_rank": (["model.lora.r=0"], ["model.lora.r must be", "at least 1", "got 0"]),
    "lora_dropout": (
        ["model.lora.r=4", "model.lora.dropout=1.5"],
        ["model.lora.dropout must be", "less than 1; got 1.5"],
    ),
}
ADAPTED = ["model=pretrained", "model.pretrained={}", "model.lora.r=4"]
STARTED: dict[str, list[str]] = {
    "all": ["parallelism=tp2", "model=pretrained", "model.pretrained={}"],
    # With the tokenizer in the folder.
    "lora": ["parallelism=tp2", *ADAPTED, "data=instructions", "data.path={}/rows.jsonl"],
    "names": ["parallelism=dp2", "model=pretrained", "model.pretrained={}/headless"],
    "adapters": ["parallelism=dp2", *ADAPTED, "model.lora.target_modules=[nothing]"],
}


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytewise")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**BYTES)).save_pretrained(
        folder, max_shard_size="40KB"
    )
    rewritten(folder, folder / "headless", lambda name: None if "lm_head" in name else name)
    keep_only_a_pickle(rewritten_copy := Path(shutil.copytree(folder, folder / "pickle")))
    assert rewritten_copy.is_dir()
    (folder / "empty").mkdir()
    a_tokenizer(folder, TEMPLATE)
    write(
        folder,
        [{"prompt": f"w{index % 30}", "response": f"w{index % 30 + 1}"} for index in range(60)],
    )
    return folder


@pytest.fixture(scope="module")
def results(bytewise: Path) -> dict[str, Result]:
    runs = bytewise / "runs"
    cases = {name: [*QUICK, *overrides] for name, overrides in STARTED.items()}
    cases["all"] = [*cases["all"], f"hydra.run.dir={runs / 'all'}"]
    cases["lora"] = [
        *cases["lora"],
        f"data.cache_dir={bytewise / 'cache'}",
        "data.val_fraction=0.3",
        f"hydra.run.dir={runs / 'lora'}",
    ]
    refused = {name: overrides for name, (overrides, _) in REFUSED.items()}
    answers = {}
    for lines, warm in ((refused, False), (cases, True)):
        filled = [
            ["train", *(word.replace("{}", str(bytewise)) for word in overrides)]
            for overrides in lines.values()
        ]
        answers |= dict(zip(lines, run_commands(filled, timeout=400, warm=warm), strict=True))
    return answers


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_torch(case: str, results: dict[str, Result]) -> None:
    assert_refused(results[case], REFUSED[case][1])
    assert not results[case].torch


@pytest.mark.timeout(600)
def test_refused_by_the_ranks(results: dict[str, Result]) -> None:
    assert_refused(results["names"], ["1 that the model has and the files lack (lm_head.weight)"])
    assert_refused(results["adapters"], ["model.lora.target_modules=['nothing']"])


@pytest.mark.timeout(600)
def test_runs_from_a_folder(results: dict[str, Result], bytewise: Path) -> None:
    """The architecture is in the run's own configuration, and the weights in its checkpoint are
    near those of the folder."""
    expected = by_transformers(bytewise).state_dict()
    for name in ("all", "lora"):
        assert results[name].code == 0, results[name].output
        config = yaml.safe_load((bytewise / "runs" / name / "config.yaml").read_text())
        assert (
            config["model"]["pretrained"] == str(bytewise)
            and config["model"]["config"]["hidden_size"] == 32
        )
        [checkpoint] = (bytewise / "runs" / name / "checkpoints").iterdir()
        state = load_full_state_dict(checkpoint)
        for key, value in expected.items():
            if name == "all":
                moved = (state[f"model.{key}"] - value).abs().max()
                # one step of AdamW with a learning rate of 1e-3, and decay
                assert 0 < moved < 2.1e-3, key
            else:
                around = f"model.base_model.model.{key}"
                wrapped = around.replace(".weight", ".base_layer.weight")
                assert torch.equal(state[wrapped] if wrapped in state else state[around], value), (
                    key
                )
        assert any("lora_B" in key for key in state) == (name == "lora")
