"""The evaluation at the end of a run, in the layout that trains it, against Transformers on one
process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from composed_configs import composed
from ranks import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d.app.config.compose import plain
from lightning_3d.app.config.plan_run import plan_run
from lightning_3d.app.training.data.python_tokens import PythonTokens
from lightning_3d.app.training.run import train
from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.errors import ConfigError

LENGTH = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
NEW = 9


def config_of(folder: Path, *overrides: str) -> dict[str, Any]:
    """The complete configuration of a run on the Python files in `folder`, in float64."""
    given = [f"model.config.{key}={value}" for key, value in SHAPE.items()]
    given += [
        "data=python_tokens",
        f"data.root={folder}/lib",
        f"data.cache_dir={folder}/cache",
        f"data.sequence_length={LENGTH}",
    ]
    given += ["data.global_batch_size=4", "data.val_fraction=0.4"]
    given += [
        "precision=fp64",
        "parallelism.zero_stage=0",
        "cluster=local_cpu",
        "trainer.max_steps=4",
    ]
    given += [
        "optimizer.lr=0.02",
        "optimizer.scheduler=null",
        "sample.temperature=0",
        f"sample.max_new_tokens={NEW}",
    ]
    config = composed(*given, *overrides)
    config.run_folder = str(folder)
    plan = plan_run(config)
    return plan.freeze(plain(config))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "lib" / f"file{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(random.choice(list("def (x):\n    return"), 60 + number)))
    return tmp_path


def trained(folder: Path) -> Any:
    """The model of the last checkpoint, in Transformers on one process."""
    state = load_full_state_dict(folder / "checkpoints" / "step_4.ckpt")
    model = (
        LlamaForCausalLM(
            LlamaConfig(**SHAPE, bos_token_id=256, eos_token_id=256, rms_norm_eps=1e-5)
        )
        .double()
        .eval()
    )
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    return model


def mean_loss(model: Any, folder: Path) -> tuple[float, int]:
    """Loss and target tokens of the held-out files, each document of each sample in a forward of
    its own."""
    data = PythonTokens(
        root=folder / "lib",
        cache_dir=folder / "cache",
        val_fraction=0.4,
        sequence_length=LENGTH,
        global_batch_size=4,
        document_mask=True,
    )
    data.setup("validate")
    assert data.val_set is not None
    total, tokens = 0.0, 0
    for index in range(len(data.val_set)):
        ids = data.val_set[index]["input_ids"]
        ends = [place + 1 for place in range(LENGTH) if ids[place] == 256] + [LENGTH]
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            if end - start > 1:
                logits = model(input_ids=ids[None, start:end]).logits[0, :-1]
                total += float(F.cross_entropy(logits, ids[start + 1 : end], reduction="sum"))
                tokens += end - start - 1
    return total / tokens, tokens


LAYOUTS = [
    ("tp2", []),
    pytest.param("tp2_pp2", ["data.document_mask=true"], marks=pytest.mark.full),
    pytest.param("cp2_dp2", [], marks=pytest.mark.full),
    pytest.param(
        "pp2_dp2",
        ["parallelism.zero_stage=3", "precision=fp32", "data.global_batch_size=8"],
        marks=pytest.mark.full,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "more"), LAYOUTS)
def test_the_run_ends_with_the_loss_and_the_text_of_its_model(
    folder: Path, layout: str, more: list[str]
) -> None:
    ranks = math.prod(int(part[-1]) for part in layout.split("_"))
    run_ranks(
        train, ranks, config_of(folder, f"parallelism={layout}", "sample.prompt='def '", *more)
    )
    found = json.loads((folder / "evaluation.json").read_text())
    with torch.no_grad():
        model = trained(folder)
        loss, tokens = mean_loss(model, folder)
        prompt = torch.tensor([list(b"def ")])
        new = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW
        )[0, 4:].tolist()
    within = 1e-6 if "precision=fp32" in more else 1e-12
    assert found["step"] == 4
    assert found["sets"]["validation"]["tokens"] == tokens
    assert found["sets"]["validation"]["loss"] == pytest.approx(loss, rel=within)
    assert found["sets"]["validation"]["perplexity"] == pytest.approx(
        math.exp(loss), rel=10 * within
    )
    assert found["sample"]["prompt"] == "def "
    assert found["sample"]["text"] == bytes(token for token in new if token != 256).decode(
        "utf-8", "replace"
    )


@pytest.mark.slow
def test_a_short_run_writes_no_sample_and_a_prompt_that_does_not_fit_is_refused(
    folder: Path,
) -> None:
    run_ranks(train, 1, config_of(folder, "parallelism=dp1", "data.val_sequences=3"))
    found = json.loads((folder / "evaluation.json").read_text())
    assert found["sample"] is None and found["sets"]["validation"]["samples"] == 3
    wrong = config_of(folder, "parallelism=dp1", f"sample.prompt={'x' * 32}", "trainer.max_steps=4")
    with pytest.raises(
        ConfigError,
        match="sample.prompt has 32 tokens, and the model takes at most 32 with its continuation",
    ):
        run_ranks(train, 1, wrong)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("sample.prompt=''",), "sample.prompt must have at least one character, or be null"),
        (
            ("sample.temperature=-1",),
            "sample.temperature must be a finite number of at least 0; got -1",
        ),
        (("sample.max_new_tokens=0",), "sample.max_new_tokens must be at least 1; got 0"),
        (
            ("sample.prompt=x", "data=tokens", "data.train_path=/x"),
            "sample.prompt needs the tokenizer of data=tokens.* Set data.tokenizer",
        ),
        (("+sample.promt=x",), 'no configuration key "sample.promt". Did you mean "sample.prompt"'),
    ],
)
def test_a_sample_that_cannot_be_is_refused_before_ranks_start(
    overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_run(composed("cluster=local_cpu", "trainer.dry=true", *overrides))


@pytest.mark.slow
def test_other_data_needs_a_tokenizer_only_for_a_prompt() -> None:
    tokens = (
        "cluster=local_cpu",
        "trainer.dry=true",
        "data=tokens",
        "data.train_path=/x",
        "data.sequence_length=128",
    )
    assert plan_run(composed(*tokens)).run.sample.prompt == "auto"
    assert (
        plan_run(composed(*tokens, "sample.prompt=x", "data.tokenizer=bytes")).run.sample.prompt
        == "x"
    )
