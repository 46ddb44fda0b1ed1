"""`lightning-3d evaluate` and `generate`: what a user sees, and what is refused before ranks
start."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import assert_refused, run_commands
from local_tasks import tasks
from torch import Tensor

from lightning_3d.checkpoint import load_full_state_dict

BYTES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES = [f"model.config.{key}={value}" for key, value in BYTES.items()] + [
    "model.config.num_key_value_heads=2"
]
RUN = [
    "train",
    *SIZES,
    "cluster=local_cpu",
    "parallelism=tp2",
    "trainer.max_steps=2",
    "trainer.checkpoint_every_n_steps=2",
]
RUN += [
    "data.sequence_length=32",
    "data.global_batch_size=4",
    "data.val_sequences=6",
    "optimizer.scheduler=null",
    "logger=csv",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**BYTES, max_position_embeddings=64)
    ).save_pretrained(folder)
    return folder


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "missing": (["evaluate", "/no/such"], ["There is no checkpoint /no/such"]),
    "other": (["evaluate", "{}/.."], ["not a complete checkpoint", "config.json"]),
    "no_data": (["evaluate", "{}"], ["data=tokens"]),
    "no_set": (
        ["evaluate", "{}", "data=tokens", "data.val_path=/no/such", "data.sequence_length=32"],
        ["/no/such"],
    ),
    "layout": (
        ["evaluate", "{}", "data=python_stdlib", "data.sequence_length=32", "parallelism=tp3"],
        ["3"],
    ),
    "group": (
        ["evaluate", "{}", "data=python_stdlib", "optimizer=sgd"],
        ["optimizer=sgd has no meaning"],
    ),
    "without_tasks": (
        ["evaluate", "{}", "--limit", "3"],
        ["--limit has a meaning only with --tasks"],
    ),
    "no_task": (["evaluate", "{}", "--tasks", ","], ["--tasks needs the name of a task"]),
    "template": (
        ["evaluate", "{}", "--apply-chat-template"],
        ["--apply-chat-template has a meaning only with --tasks"],
    ),
    "limit": (["evaluate", "{}", "--tasks", "x", "--limit", "1.5"], ["--limit must be", "got 1.5"]),
    "folder": (
        ["evaluate", "{}", "--tasks", "x", "--include-path", "/no/such"],
        ["there is no folder /no/such"],
    ),
    "option": (["evaluate", "{}", "--jsn", "x"], ["no option --jsn", "--json"]),
    "tokenizer": (["generate", "{}", "Hello"], ["has no tokenizer", "--tokenizer"]),
    "top_p": (
        ["generate", "{}", "Hello", "--top-p", "0"],
        ["--top-p must be a number of more than 0 and at most 1; got 0"],
    ),
    "tokens": (
        ["generate", "{}", "Hello", "--max-new-tokens", "0"],
        ["--max-new-tokens", "at least 1"],
    ),
    "no_prompt": (["generate", "{}"], ["PROMPT", "must be given"]),
}


@pytest.mark.slow
def test_mistakes_end_with_one_message_before_torch_is_imported(folder: Path) -> None:
    lines = [
        [word.format(folder) if word.startswith("{}") else word for word in line]
        for line, _ in REFUSED.values()
    ]
    results = run_commands([["evaluate", "--help"], ["generate", "--help"], *lines])
    for helped in results[:2]:
        assert (
            helped.code == 0 and "Usage: lightning-3d" in helped.output and "MODEL" in helped.output
        )
    for (_, words), result in zip(REFUSED.values(), results[2:], strict=True):
        assert_refused(result, words)
        assert not result.torch


@pytest.mark.full
def test_a_run_is_evaluated_in_its_layout_and_in_others(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved.ckpt"
    assert run_commands([[*RUN, f"hydra.run.dir={run}"]], warm=True)[0].code == 0
    # a checkpoint has the configuration of its run in it
    (run / "checkpoints" / "step_2.ckpt").rename(moved)
    files = [tmp_path / f"{number}.json" for number in range(3)]
    evaluated = ["evaluate", str(moved), "data.val_sequences=7", "--json"]
    text = ["generate", str(moved), "def main", "--max-new-tokens", "6"]
    lines = [
        [*evaluated, str(files[0])],
        [*evaluated, str(files[1]), "parallelism=pp2_dp2"],
        text,
        [*text, "parallelism=dp1"],
    ]
    results = run_commands(lines, warm=True)
    assert [result.code for result in results] == [0] * 4, [result.output for result in results]
    first, second = (json.loads(file.read_text()) for file in files[:2])
    assert (first["layout"], second["layout"]) == ("tp2", "pp2_dp2")
    assert first["sets"]["validation"]["samples"] == second["sets"]["validation"]["samples"] == 7
    assert first["sets"]["validation"]["loss"] == pytest.approx(
        second["sets"]["validation"]["loss"], rel=1e-6
    )
    written = [result.output[result.output.index("def main") :] for result in results[2:]]
    assert written[0] == written[1] and len(written[0]) > len("def main\n")


AVERAGED = [*RUN, "trainer.average_decay=0.5", "optimizer.lr=0.02"]
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}


def probabilities(model: Any, tokens: list[int]) -> Tensor:
    """Logarithms of the probabilities of each next token, (tokens, vocabulary), by Transformers
    alone."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def scored(model: Any, question: str, answer: str) -> float:
    """The log-likelihood of an answer in bytes, after the question or else after the byte that ends
    a document."""
    context, more = list(question.encode()) or [256], list(f" {answer}".encode())
    found = probabilities(model, context + more)[len(context) - 1 : -1]
    return float(found.gather(1, torch.tensor(more)[:, None]).sum())


def greedy(model: Any, text: str, count: int) -> str:
    tokens = list(text.encode())
    for _ in range(count):
        tokens.append(int(probabilities(model, tokens)[-1].argmax()))
    assert max(tokens) < 256
    return bytes(tokens).decode("utf-8", "replace")


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_commands_take_the_average_of_a_run(tmp_path: Path, folder: Path) -> None:
    """Text and scores of tasks are those of Transformers with the exported average, and the loss is
    that of the exported folder."""
    pytest.importorskip("lm_eval")
    run, own, output = tmp_path / "run", tmp_path / "tasks", tmp_path / "tasks_of_the_average"
    for made in (own, output):
        made.mkdir()
    tasks(own)
    checkpoint, average, plain = (
        str(run / "checkpoints" / "step_2.ckpt"),
        str(tmp_path / "average"),
        str(tmp_path / "plain"),
    )
    shape = [
        "data=python_stdlib",
        "data.sequence_length=32",
        "data.global_batch_size=4",
        "data.val_sequences=6",
    ]
    files = [tmp_path / f"{number}.json" for number in range(3)]
    lines = [
        [*AVERAGED, f"hydra.run.dir={run}"],
        ["export", checkpoint, "--average", "--output", average],
        ["export", checkpoint, "--output", plain],
        ["evaluate", checkpoint, "--average", shape[-1], "--json", str(files[0])],
        ["evaluate", average, *shape, "--json", str(files[1])],
        ["evaluate", checkpoint, shape[-1], "--json", str(files[2])],
        [
            "evaluate",
            checkpoint,
            "--average",
            "--tasks",
            "tiny_choice",
            "--include-path",
            str(own),
            "--log-samples",
            "--limit",
            "4",
            "--json",
            str(output / "results.json"),
            "parallelism=dp2",
        ],
        [
            "generate",
            checkpoint,
            "def main",
            "--max-new-tokens",
            "6",
            "--average",
            "parallelism=pp2",
        ],
        ["evaluate", average, *shape, "--average"],
        ["generate", average, "def main", "--tokenizer", "bytes", "--average"],
    ]
    results = run_commands(lines, warm=True, timeout=1200, **OFFLINE)
    assert [result.code for result in results[:8]] == [0] * 8, [result.output for result in results]
    for refused in results[8:]:
        assert_refused(refused, ["has no average of weights"])
    models: list[Any] = [
        transformers.LlamaForCausalLM.from_pretrained(name).eval() for name in (average, plain)
    ]
    for model, is_average in zip(models, (True, False), strict=True):
        expected = load_full_state_dict(checkpoint, average=is_average)
        assert all(
            value.equal(expected[f"model.{key}"]) for key, value in model.state_dict().items()
        )
    losses = [json.loads(file.read_text())["sets"]["validation"]["loss"] for file in files]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] != pytest.approx(
        losses[2], rel=1e-3
    )
    assert greedy(models[0], "def main", 6) in results[7].output
    (samples,) = output.glob("samples_tiny_choice_*.jsonl")
    rows = list(map(json.loads, samples.read_text().splitlines()))
    assert len(rows) == 4
    for row in rows:
        answers = [float(ast.literal_eval(str(answer))[0]) for [answer] in row["resps"]]
        of_average, of_weights = (
            [scored(model, row["doc"]["question"], text) for text in row["doc"]["answers"]]
            for model in models
        )
        assert answers == pytest.approx(of_average, rel=1e-5) and answers != pytest.approx(
            of_weights, rel=1e-3
        )
