"""DPO and distillation by configuration: losses of their formulas, frozen second models, pairs of
real text."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.objective import DistilledLM, divergence, make_module
from lightning_3d.app.training.preference import PreferenceLM
from lightning_3d.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
OPTIMIZER = {"name": "adamw", "lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("pretrained")
    LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).save_pretrained(path)
    return str(path)


def module_of(objective: dict[str, Any], folder: str | None) -> Any:
    model = {"name": "tiny", "config": {"model_type": "llama", **SIZES}, "pretrained": folder}
    module = make_module({"model": model, "optimizer": OPTIMIZER, "objective": objective})
    module.configure_model()
    module.log = lambda *args, **kwargs: None
    return module


def pairs() -> dict[str, Tensor]:
    data = make_data_module(
        {
            "name": "python_pairs",
            "sequence_length": 16,
            "global_batch_size": 4,
            "seed": 0,
            "vocab_size": 257,
        }
    )
    data.setup("fit")
    return {
        key: torch.stack([data.train_set[row][key] for row in range(4)])
        for key in data.train_set[0]
    }


def test_pairs_have_one_prompt_and_two_answers() -> None:
    batch = pairs()
    assert (batch["input_ids"][:, :8] == batch["rejected_ids"][:, :8]).all()
    assert (batch["input_ids"][:, 8:] != batch["rejected_ids"][:, 8:]).any(1).all()
    for ids, labels in (("input_ids", "labels"), ("rejected_ids", "rejected_labels")):
        assert (batch[labels][:, :8] == -100).all() and (
            batch[labels][:, 8:] == batch[ids][:, 8:]
        ).all()


def score(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """By Transformers' loss: the sum over the targets of each row."""
    rows = [(row[None], target[None]) for row, target in zip(ids, labels, strict=True)]
    return -torch.stack(
        [
            model(input_ids=row, labels=target).loss * (target[:, 1:] != -100).sum()
            for row, target in rows
        ]
    )


def test_dpo_starts_at_log_2_and_follows_its_formula(folder: str) -> None:
    module, batch = module_of({"name": "dpo", "beta": 0.3}, folder), pairs()
    assert isinstance(module, PreferenceLM) and module.beta == 0.3
    loss = module.training_step(batch, 0)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-5)
    optimizer = module.configure_optimizers()
    loss.backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in module.reference.parameters())
    plain = LlamaForCausalLM.from_pretrained(folder)
    chosen, rejected = (
        (batch["input_ids"], batch["labels"]),
        (batch["rejected_ids"], batch["rejected_labels"]),
    )
    with torch.no_grad():
        margins = (
            score(module.model, *chosen)
            - score(module.model, *rejected)
            - score(plain, *chosen)
            + score(plain, *rejected)
        )
        expected = (1 + (-0.3 * margins).exp()).log().mean()
        assert module.training_step(batch, 0).item() == pytest.approx(expected.item(), rel=1e-4)
    assert expected < math.log(2)


def test_the_divergence_is_that_of_its_definition() -> None:
    torch.manual_seed(0)
    logits, wanted = (
        torch.randn(2, 5, 7, dtype=torch.float64),
        torch.randn(2, 5, 7, dtype=torch.float64),
    )
    labels = torch.ones(2, 5, dtype=torch.long)
    labels[0, :3] = -100
    kept = [
        (row, place) for row in range(2) for place in range(4) if labels[row, place + 1] != -100
    ]
    p, q = (wanted / 2).softmax(-1), (logits / 2).softmax(-1)
    each = [(p[place] * (p[place] / q[place]).log()).sum().item() for place in kept]
    assert divergence(logits, wanted, labels, 2.0).item() == pytest.approx(
        4 * sum(each) / len(kept), rel=1e-12
    )


def test_a_student_that_equals_its_teacher_learns_from_the_data_alone(folder: str) -> None:
    batch = pairs()
    module = module_of({"name": "distillation", "teacher": folder, "teacher_weight": 0.25}, folder)
    assert isinstance(module, DistilledLM)
    plain = module.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    torch.testing.assert_close(module.training_step(batch, 0), 0.75 * plain)
    assert not any(parameter.requires_grad for parameter in module.teacher.parameters())


def test_a_teacher_with_another_vocabulary_is_refused(folder: str) -> None:
    model = {"name": "tiny", "config": {"model_type": "llama", **SIZES, "vocab_size": 300}}
    with pytest.raises(ConfigError, match="has a vocabulary of 257 tokens, but the model has 300"):
        DistilledLM(model, OPTIMIZER, teacher=folder)
