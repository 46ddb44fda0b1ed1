"""`lightning-3d evaluate` and `generate`: what a user sees, and what is refused before ranks start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from command_line import assert_refused, run_commands

BYTES = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = [f"model.config.{key}={value}" for key, value in BYTES.items()] + ["model.config.num_key_value_heads=2"]
RUN = ["train", *SIZES, "cluster=local_cpu", "parallelism=tp2", "trainer.max_steps=2", "trainer.checkpoint_every_n_steps=2"]
RUN += ["data.sequence_length=32", "data.global_batch_size=4", "data.val_sequences=6", "optimizer.scheduler=null", "logger=csv"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**BYTES, max_position_embeddings=64)).save_pretrained(folder)
    return folder


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "missing": (["evaluate", "/no/such"], ["There is no checkpoint /no/such"]),
    "other": (["evaluate", "{}/.."], ["not a complete checkpoint", "config.json"]),
    "no_data": (["evaluate", "{}"], ["data=tokens"]),
    "no_set": (["evaluate", "{}", "data=tokens", "data.val_path=/no/such", "data.sequence_length=32"], ["/no/such"]),
    "layout": (["evaluate", "{}", "data=python_stdlib", "data.sequence_length=32", "parallelism=tp3"], ["3"]),
    "group": (["evaluate", "{}", "data=python_stdlib", "optimizer=sgd"], ["optimizer=sgd has no meaning"]),
    "without_tasks": (["evaluate", "{}", "--limit", "3"], ["--limit has a meaning only with --tasks"]),
    "no_task": (["evaluate", "{}", "--tasks", ","], ["--tasks needs the name of a task"]),
    "limit": (["evaluate", "{}", "--tasks", "x", "--limit", "1.5"], ["--limit must be", "got 1.5"]),
    "folder": (["evaluate", "{}", "--tasks", "x", "--include-path", "/no/such"], ["there is no folder /no/such"]),
    "option": (["evaluate", "{}", "--jsn", "x"], ["no option --jsn", "--json"]),
    "tokenizer": (["generate", "{}", "Hello"], ["has no tokenizer", "--tokenizer"]),
    "top_p": (["generate", "{}", "Hello", "--top-p", "0"], ["--top-p must be a number of more than 0 and at most 1; got 0"]),
    "tokens": (["generate", "{}", "Hello", "--max-new-tokens", "0"], ["--max-new-tokens", "at least 1"]),
    "no_prompt": (["generate", "{}"], ["PROMPT", "must be given"]),
}


def test_mistakes_end_with_one_message_before_torch_is_imported(folder: Path) -> None:
    lines = [[word.format(folder) if word.startswith("{}") else word for word in line] for line, _ in REFUSED.values()]
    results = run_commands([["evaluate", "--help"], ["generate", "--help"], *lines])
    for helped in results[:2]:
        assert helped.code == 0 and "Usage: lightning-3d" in helped.output and "MODEL" in helped.output
    for (_, words), result in zip(REFUSED.values(), results[2:], strict=True):
        assert_refused(result, words)
        assert not result.torch


@pytest.mark.full
def test_a_run_is_evaluated_in_its_layout_and_in_others(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved.ckpt"
    assert run_commands([[*RUN, f"hydra.run.dir={run}"]], warm=True)[0].code == 0
    (run / "checkpoints" / "step_2.ckpt").rename(moved)  # a checkpoint has the configuration of its run in it
    files = [tmp_path / f"{number}.json" for number in range(3)]
    evaluated = ["evaluate", str(moved), "data.val_sequences=7", "--json"]
    text = ["generate", str(moved), "def main", "--max-new-tokens", "6"]
    lines = [[*evaluated, str(files[0])], [*evaluated, str(files[1]), "parallelism=pp2_dp2"], text, [*text, "parallelism=dp1"]]
    results = run_commands(lines, warm=True)
    assert [result.code for result in results] == [0] * 4, [result.output for result in results]
    first, second = (json.loads(file.read_text()) for file in files[:2])
    assert (first["layout"], second["layout"]) == ("tp2", "pp2_dp2")
    assert first["sets"]["validation"]["samples"] == second["sets"]["validation"]["samples"] == 7
    assert first["sets"]["validation"]["loss"] == pytest.approx(second["sets"]["validation"]["loss"], rel=1e-6)
    written = [result.output[result.output.index("def main") :] for result in results[2:]]
    assert written[0] == written[1] and len(written[0]) > len("def main\n")
