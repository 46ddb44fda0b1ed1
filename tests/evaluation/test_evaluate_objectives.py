"""Runs of DPO and distillation are evaluated from their checkpoints, whose second model is neither
built nor read, against Transformers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from command_line import run_commands
from composed_configs import composed
from local_tasks import tasks
from ranks import run_ranks
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d.app.config.compose import plain
from lightning_3d.app.config.plan_run import plan_run
from lightning_3d.app.evaluation.engine import EvaluationEngine
from lightning_3d.app.evaluation.generation import Sampling, generate
from lightning_3d.app.evaluation.job import check
from lightning_3d.app.evaluation.session import Session
from lightning_3d.app.evaluation.subject import find_subject
from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.run import train
from lightning_3d.checkpoint import load_full_state_dict

LENGTH, STEPS, NEW = 16, 2, 6
SHAPE: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}
OTHER = {"dpo": "reference", "distillation": "teacher"}
DATA = {"dpo": "python_pairs", "distillation": "python_stdlib"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Python files, and a model folder of Transformers in float64 from which a run starts or
    learns."""
    random = np.random.default_rng(0)
    (tmp_path / "lib").mkdir()
    for number in range(12):
        (tmp_path / "lib" / f"file{number}.py").write_text(
            "".join(random.choice(list("def (x):\n    return"), 60 + number))
        )
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.2)).double().save_pretrained(
        tmp_path / "first"
    )
    return tmp_path


def overrides(folder: Path, objective: str, layout: str) -> list[str]:
    first = f"{folder}/first"
    given = ["model=pretrained", f"model.pretrained={first}"]
    if objective == "distillation":
        given = [
            *(f"model.config.{key}={value}" for key, value in SHAPE.items()),
            f"objective.teacher={first}",
        ]
    given += [
        f"objective.name={objective}",
        f"data={DATA[objective]}",
        f"data.root={folder}/lib",
        f"data.sequence_length={LENGTH}",
    ]
    given += [
        "data.global_batch_size=4",
        "data.val_fraction=0.4",
        "data.val_sequences=4",
        f"parallelism={layout}",
        "cluster=local_cpu",
    ]
    given += [f"trainer.max_steps={STEPS}", "optimizer.lr=0.02", "optimizer.scheduler=null"]
    given += ["sample.prompt='def '", "sample.temperature=0", f"sample.max_new_tokens={NEW}"]
    return given


def train_run(folder: Path, objective: str, layout: str) -> Path:
    """Train in float64, remove the folder of the second model, and return the checkpoint."""
    config = composed(
        *overrides(folder, objective, layout), "precision=fp64", "parallelism.zero_stage=0"
    )
    config.run_folder = str(folder / "run")
    plan = plan_run(config)
    run_ranks(train, plan.layout.world_size, plan.freeze(plain(config)))
    shutil.rmtree(folder / "first")
    return folder / "run" / "checkpoints" / f"step_{STEPS}.ckpt"


def by_transformers(checkpoint: Path, name: str) -> Any:
    """One of the models of a checkpoint, on one process."""
    state = {
        key: value
        for key, value in load_full_state_dict(checkpoint).items()
        if key.startswith(f"{name}.")
    }
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).double().eval()
    model.load_state_dict({key.removeprefix(f"{name}."): value for key, value in state.items()})
    return model


def samples(folder: Path, objective: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Token ids and labels of so many held-out samples, by default of all; of pairs those with the
    chosen answers."""
    data = {
        "name": DATA[objective],
        "root": folder / "lib",
        "sequence_length": LENGTH,
        "val_fraction": 0.4,
        "global_batch_size": 4,
    }
    data |= {} if count is None else {"val_sequences": count}
    module = make_data_module(data, seed=0, vocab_size=257)
    module.setup("validate")
    rows = [module.val_set[index] for index in range(len(module.val_set))]
    return torch.stack([row["input_ids"] for row in rows]), torch.stack(
        [row["labels"] for row in rows]
    )


def loss_of(model: Any, ids: Tensor, labels: Tensor) -> tuple[float, int]:
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return float(F.cross_entropy(logits, labels[:, 1:].flatten())), int(
        (labels[:, 1:] != -100).sum()
    )


def greedy(model: Any, prompt: list[int]) -> list[int]:
    for _ in range(NEW):
        with torch.no_grad():
            prompt = [*prompt, int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())]
    return prompt[-NEW:]


def evaluated(config: dict[str, Any], checkpoint: str) -> tuple[float, int, list[int]]:
    """Loss, target tokens and greedy text on this rank."""
    session = Session(config, checkpoint)
    [found] = session.losses()
    assert not any(hasattr(session.module, name) for name in OTHER.values())
    text = session.work(
        lambda trainer: generate(
            EvaluationEngine(trainer, 32), [list(b"def ")], Sampling(max_new_tokens=NEW)
        )
    )[0]
    return found.loss, found.tokens, text


RUNS = [
    ("dpo", "pp2", "tp2"),
    ("distillation", "tp2", "pp2"),
    pytest.param("dpo", "tp2", "cp2_dp2", marks=pytest.mark.full),
    pytest.param("distillation", "pp2", "tp2_pp2", marks=pytest.mark.full),
]


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "trained", "layout"), RUNS)
def test_the_trained_model_is_read_from_the_checkpoint(
    folder: Path, objective: str, trained: str, layout: str
) -> None:
    checkpoint = train_run(folder, objective, trained)
    evaluation = check(
        find_subject(checkpoint, str(checkpoint)),
        [f"parallelism={layout}", "precision=fp64"],
        None,
        reads_data=True,
    )
    config = evaluation.plan.freeze(plain(evaluation.config))
    model, other = (by_transformers(checkpoint, name) for name in ("model", OTHER[objective]))
    ids, labels = samples(folder, objective)
    loss, tokens = loss_of(model, ids, labels)
    assert loss != pytest.approx(loss_of(other, ids, labels)[0], rel=1e-3)
    assert_run_ends_with(folder, objective, model)
    for found in run_ranks(evaluated, evaluation.plan.layout.world_size, config, str(checkpoint)):
        assert found == (pytest.approx(loss, rel=1e-12), tokens, greedy(model, list(b"def ")))


def assert_run_ends_with(folder: Path, objective: str, model: Any) -> None:
    """The run wrote text of the trained model; distillation also its loss in the last
    validation."""
    found = json.loads((folder / "run" / "evaluation.json").read_text())
    new = greedy(model, list(b"def "))
    new = new[: new.index(256)] if 256 in new else new
    assert (found["sample"]["prompt"], found["sample"]["text"]) == (
        "def ",
        bytes(new).decode("utf-8", "replace"),
    )
    if objective == "dpo":
        assert found["sets"] == {}
    else:
        loss, tokens = loss_of(model, *samples(folder, objective, 4))
        assert found["sets"]["validation"]["loss"] == pytest.approx(loss, rel=1e-12)
        assert (found["sets"]["validation"]["tokens"], found["sets"]["validation"]["samples"]) == (
            tokens,
            4,
        )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_commands_take_a_run_of_dpo(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    checkpoint, own = train_run(folder, "dpo", "pp2"), folder / "tasks"
    own.mkdir()
    tasks(own)
    words = ["precision=fp64", "parallelism=dp1"]
    lines = [
        ["evaluate", str(checkpoint), *words, "--json", f"{folder}/losses.json"],
        ["generate", str(checkpoint), "def ", "--max-new-tokens", str(NEW), *words],
        [
            "evaluate",
            str(checkpoint),
            "--tasks",
            "tiny_choice",
            "--include-path",
            str(own),
            "--log-samples",
            "--limit",
            "4",
            "--max-length",
            "32",
            "--json",
            f"{folder}/results/results.json",
            *words,
        ],
    ]
    (folder / "results").mkdir()
    results = run_commands(
        lines, warm=True, timeout=600, HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1"
    )
    assert [result.code for result in results] == [0] * 3, [result.output for result in results]
    model = by_transformers(checkpoint, "model")
    ids, labels = samples(folder, "dpo")
    loss, tokens = loss_of(model, ids, labels)
    found = json.loads((folder / "losses.json").read_text())["sets"]["validation"]
    wanted = {
        "loss": pytest.approx(loss, rel=1e-12),
        "perplexity": pytest.approx(math.exp(loss)),
        "tokens": tokens,
        "samples": len(ids),
    }
    assert found == wanted
    assert bytes(greedy(model, list(b"def "))).decode("utf-8", "replace") in results[1].output
    assert (folder / "results" / "results.json").is_file()
