"""Tasks of lm-eval in a layout, against lm-eval's own HFLM on one process. The tasks are files of this test: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_3d.cli.evaluate import evaluate_rank
from lightning_3d.config.compose import plain
from lightning_3d.evaluation.job import check
from lightning_3d.evaluation.subject import find_subject
from lightning_3d.evaluation.text import stop_tokens

ROWS = [
    {"question": "Two and two make", "choices": [" four", " five and more"], "answer": 0, "text": "It rains. It pours."},
    {"question": "A bird can", "choices": [" swim", " fly"], "answer": 1, "text": "The dog barks at night."},
    {"question": "Snow is", "choices": [" white", " black"], "answer": 0, "text": "x" * 150},
    {"question": "", "choices": [" nothing", " something"], "answer": 1, "text": "End."},
    {"question": "The sea has", "choices": [" waves", " wheels"], "answer": 0, "text": "To be, or not."},
]
CHOICE = """\
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}, {{metric: brier_score}}]
"""
TEXT = """\
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
ANSWER = """\
task: local_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12}}
metric_list: [{{metric: bleu}}, {{metric: chrf}}]
"""
NAMES = ("local_choice", "local_text", "local_answer")


def bytewise(folder: Path) -> Any:
    """A tokenizer whose tokens are bytes, and the two ends of a document."""
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    made.save_pretrained(folder)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with its tokenizer, in float64, and a folder of tasks in it."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = bytewise(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **ends)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    (folder / "tasks").mkdir()
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(row) for row in ROWS))
    for name, text in zip(NAMES, (CHOICE, TEXT, ANSWER), strict=True):
        (folder / "tasks" / f"{name}.yaml").write_text(text.format(file=rows))
    return folder


def run_evaluation(config: dict[str, Any], request: dict[str, Any]) -> None:
    evaluate_rank(config, None, request)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layout", "ranks"), [("tp2", 2), ("pp2_dp2", 4)])
def test_tasks_equal_those_of_hflm(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, ranks: int
) -> None:
    pytest.importorskip("lm_eval", reason="the package lm-eval is not installed (extra eval)")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    plainly = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=1)
    manager = TaskManager(include_path=str(folder / "tasks"))
    expected: Any = simple_evaluate(model=plainly, tasks=list(NAMES), task_manager=manager, bootstrap_iters=0, num_fewshot=1)

    subject = find_subject(folder, str(folder))
    evaluation = check(subject, ["precision=fp64", "cluster=local_cpu", f"parallelism={layout}"], None, reads_data=False)
    config = evaluation.plan.freeze(plain(evaluation.config))
    tasks = {"names": NAMES, "include_path": str(folder / "tasks"), "num_fewshot": 1}
    request = {"about": {}, "reads_data": False, "tasks": tasks, "tokenizer": str(folder), "stop": stop_tokens(subject)}
    run_ranks(run_evaluation, ranks, config, {**request, "json": str(tmp_path / "tasks.json")}, timeout=800)
    found = json.loads((tmp_path / "tasks.json").read_text())["tasks"]
    compared = 0
    for name in NAMES:
        for key, value in expected["results"][name].items():
            if "," in key and isinstance(value, float) and "_stderr" not in key:
                assert found[name][key] == pytest.approx(value, rel=1e-9, abs=1e-9), (name, key)
                compared += 1
    assert compared >= 6
