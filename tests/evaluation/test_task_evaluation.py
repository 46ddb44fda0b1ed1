"""Tasks of lm-eval in several layouts, against lm-eval's own model class for Transformers on one
process."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from local_tasks import NAMES, NEW_TOKENS, POSITIONS, STOP, a_model, tasks
from ranks import run_ranks

from lightning_3d.app.cli.evaluate_tasks import evaluate_tasks_rank
from lightning_3d.app.config.compose import plain
from lightning_3d.app.evaluation import tasks as found_tasks
from lightning_3d.app.evaluation.job import check
from lightning_3d.app.evaluation.subject import find_subject
from lightning_3d.app.evaluation.tasks import Tasks, find_tasks, find_tasks_apart, require_lm_eval
from lightning_3d.app.evaluation.text import open_text, require_chat_template
from lightning_3d.errors import ConfigError, DataError

lm_eval = pytest.importorskip("lm_eval")

ENVIRONMENT = "torch.utils.collect_env.get_pretty_env_info"
"""Starts a dozen programs to describe the machine in the file of results."""


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def expected(model: Path, folder: Path) -> dict[str, Any]:
    return by_transformers(model, folder)


def by_transformers(model: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """What lm-eval computes with Transformers, one text at a time."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    inner = AutoModelForCausalLM.from_pretrained(model).eval()
    reference = HFLM(
        pretrained=inner, tokenizer=AutoTokenizer.from_pretrained(model), batch_size=1, device="cpu"
    )
    assert reference.max_length == POSITIONS
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    with mock.patch(ENVIRONMENT, return_value=""):
        return dict(
            lm_eval.simple_evaluate(reference, tasks=list(NAMES), task_manager=manager, **options)
        )


TEMPLATE = (
    "{{ bos_token }} {% for turn in messages %}{{ {'user': 'w30 ', 'assistant': 'w31 '}[turn.role]"
    " }}{{ turn.content }} [end] {% endfor %}{% if add_generation_prompt %}w31 {% endif %}"
)
"""A chat template of words."""


def with_template(model: Path, folder: Path) -> Path:
    """The same model, with a tokenizer that has the template."""
    from transformers import AutoTokenizer

    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def request(folder: Path, output: Path, **options: Any) -> dict[str, Any]:
    return {
        "tasks": asdict(Tasks(NAMES, str(folder))),
        "found": None,
        "tokenizer": options.pop("tokenizer", None),
        "stop": (2,),
        "max_length": options.pop("max_length", None),
        "about": {"model": "tiny", "layout": ""},
        "folder": str(output),
        "file": str(output / "results.json"),
        "options": {"num_fewshot": None, "limit": None, "log_samples": True, **options},
    }


def evaluate(config: dict[str, Any], wanted: dict[str, Any]) -> None:
    with mock.patch(ENVIRONMENT, return_value=""):
        evaluate_tasks_rank(config, None, wanted)


def run(model: Path, layout: str, wanted: dict[str, Any], *overrides: str) -> None:
    chosen = [
        "precision=fp32",
        "cluster=local_cpu",
        f"parallelism={layout}",
        "parallelism.micro_batch_size=3",
        *overrides,
    ]
    evaluation = check(find_subject(model, "model"), chosen, None, reads_data=False)
    ranks = math.prod(int(part[-1]) for part in layout.split("_"))
    run_ranks(
        evaluate,
        ranks,
        evaluation.plan.freeze(plain(evaluation.config)),
        {**wanted, "tokenizer": str(model)},
    )


def samples(output: Path, name: str) -> list[dict[str, Any]]:
    (file,) = output.glob(f"samples_{name}_*.jsonl")
    return sorted(
        map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"]
    )


def flat(value: Any) -> list[Any]:
    """Answers of a sample, as the file of samples writes them, or as lm-eval returns them."""
    if isinstance(value, (list, tuple)):
        return [answer for item in value for answer in flat(item)]
    try:
        return [ast.literal_eval(value)] if isinstance(value, str) else [value]
    except (SyntaxError, ValueError):
        return [value]


LAYOUTS = [
    pytest.param("pp2_dp2", []),
    *(
        pytest.param(layout, [], marks=pytest.mark.full)
        for layout in ("dp1", "dp3", "tp2", "pp2", "cp2", "tp2_cp2")
    ),
    pytest.param("dp2", ["parallelism.zero_stage=3"], marks=pytest.mark.full),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "overrides"), LAYOUTS)
def test_results_are_those_of_lm_eval_with_transformers(
    model: Path,
    folder: Path,
    expected: dict[str, Any],
    tmp_path: Path,
    layout: str,
    overrides: list[str],
) -> None:
    run(model, layout, request(folder, tmp_path), *overrides)
    assert_same(tmp_path, expected)


@pytest.mark.full
def test_chat_templates_are_those_of_lm_eval_with_transformers(
    model: Path, folder: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    """With examples, which are earlier turns."""
    talks = with_template(model, tmp_path / "model")
    wanted = by_transformers(talks, folder, apply_chat_template=True, num_fewshot=2)
    run(talks, "dp2", request(folder, tmp_path / "out", apply_chat_template=True, num_fewshot=2))
    found = assert_same(tmp_path / "out", wanted)
    assert found["chat_template"] == TEMPLATE and found["fewshot_as_multiturn"]
    for name in ("tiny_choice", "tiny_text"):
        assert flat(samples(tmp_path / "out", name)[2]["resps"]) != flat(
            expected["samples"][name][2]["resps"]
        )


def assert_same(output: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Compare the metrics and each answer of a run with those of lm-eval. Returns what the file of
    results has."""
    found: dict[str, Any] = json.loads((output / "results.json").read_text())
    assert set(found["results"]) == set(NAMES)
    for name in NAMES:
        for metric, value in expected["results"][name].items():
            assert found["results"][name][metric] == (
                pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            ), metric
        pairs = list(zip(samples(output, name), expected["samples"][name], strict=True))
        for sample, right in pairs:
            answers, others = flat(sample["resps"]), flat(right["resps"])
            assert [type(answer) for answer in answers] == [type(answer) for answer in others]
            for answer, other in zip(answers, others, strict=True):
                assert answer == (
                    pytest.approx(other, rel=1e-6) if isinstance(other, float) else other
                )
        assert [sample["doc_hash"] for sample, _ in pairs] == [
            right["doc_hash"] for _, right in pairs
        ]
    return found


def test_the_tasks_are_not_trivial(expected: dict[str, Any]) -> None:
    """Some texts end at the word, others at the number of tokens; some answers are the most
    probable ones; some lose their left end."""
    texts = [flat(sample["resps"])[0].split() for sample in expected["samples"]["tiny_text"]]
    assert {len(text) == NEW_TOKENS for text in texts} == {True, False} and not any(
        STOP in text for text in texts
    )
    assert len({text[0] for text in texts if text}) > 3
    lengths = [len(sample["doc"]["text"].split()) for sample in expected["samples"]["tiny_long"]]
    assert min(lengths) < POSITIONS < max(lengths)


@pytest.mark.full
def test_options_reach_lm_eval(model: Path, folder: Path, tmp_path: Path) -> None:
    run(model, "dp1", request(folder, tmp_path, limit=2, max_length=40))
    assert {name: len(samples(tmp_path, name)) for name in NAMES} == dict.fromkeys(NAMES, 2)
    found = json.loads((tmp_path / "results.json").read_text())
    assert (
        found["config"]["limit"] == 2
        and found["max_length"] == 40
        and found["model_name"] == "tiny"
    )


def test_a_length_that_the_model_does_not_take_is_refused(
    model: Path, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match="Rows of 65 tokens are longer than the 64 that the model takes. Use --max-length 64",
    ):
        run(model, "dp1", request(folder, tmp_path, max_length=65))


# What is refused


def test_a_tokenizer_without_a_chat_template_is_refused(model: Path) -> None:
    text: Any = open_text(str(model), ())
    with pytest.raises(
        ConfigError, match="has no chat template. Evaluate without --apply-chat-template"
    ):
        require_chat_template(text, str(model))
    text.inner.chat_template = {"tools": TEMPLATE, "answers": TEMPLATE}
    with pytest.raises(
        ConfigError,
        match=r"has several chat templates \(answers and tools\), and none is called default",
    ):
        require_chat_template(text, str(model))
    text.inner.chat_template = {"tools": TEMPLATE, "default": TEMPLATE}
    require_chat_template(text, str(model))
    with pytest.raises(ConfigError, match="Bytes have no chat template"):
        require_chat_template(open_text("bytes", ()), "bytes")


def own_tasks_only(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Leave out lm-eval's own tasks: it takes 10 s of processor time to index them."""
    from lm_eval.tasks import TaskManager

    patch.setattr(
        found_tasks,
        "_index",
        lambda tasks: TaskManager(include_path=str(folder), include_defaults=False),
    )


def test_tasks_are_found_by_name_and_pattern(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_tasks_only(monkeypatch, folder)
    assert find_tasks(Tasks(("tiny_l*", "tiny_choice", "tiny_long")))[1] == [
        "tiny_long",
        "tiny_choice",
    ]


def test_an_unknown_task_is_refused_with_the_nearest_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_tasks_only(monkeypatch, folder)
    with pytest.raises(ConfigError, match="There is no task tiny_choise. The nearest: tiny_choice"):
        find_tasks(Tasks(("tiny_choise",)))
    with pytest.raises(
        ConfigError, match="There is no task long_. The nearest: tiny_long|lm-eval ls tasks"
    ):
        find_tasks(Tasks(("long_",)))


def test_a_task_that_is_asked_for_twice_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in folder.glob("*.yaml"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "both.yaml").write_text("group: tiny_both\ntask: [tiny_long, tiny_choice]\n")
    own_tasks_only(monkeypatch, tmp_path)
    assert find_tasks(Tasks(("tiny_both",)))[1] == ["tiny_both"]
    with pytest.raises(
        ConfigError, match="tiny_long is asked for twice: by tiny_both and by tiny_long"
    ):
        find_tasks(Tasks(("tiny_both", "tiny_long")))


CHANGES = {
    "samples": (
        "tiny_text",
        "until:",
        "do_sample: true, until:",
        ConfigError,
        r"tiny_text samples its text \(do_sample\)",
    ),
    "temperature": (
        "tiny_text",
        "until:",
        "temperature: 0.5, until:",
        ConfigError,
        r"tiny_text samples its text \(do_sample\)",
    ),
    "beams": (
        "tiny_text",
        "until:",
        "num_beams: 4, until:",
        ConfigError,
        "tiny_text sets num_beams; only greedy decoding",
    ),
    "missing": (
        "tiny_long",
        "tiny_long.jsonl",
        "gone.jsonl",
        DataError,
        "tiny_long cannot be loaded: .*gone.jsonl.*HF_HOME",
    ),
    "template": (
        "tiny_choice",
        "'{{answers}}'",
        "'{{answers'",
        DataError,
        "tiny_choice cannot be loaded",
    ),
}


@pytest.mark.parametrize("case", sorted(CHANGES))
def test_a_task_that_cannot_run_is_refused(folder: Path, tmp_path: Path, case: str) -> None:
    name, before, after, error, words = CHANGES[case]
    text = (folder / f"{name}.yaml").read_text()
    assert before in text
    (tmp_path / f"{name}.yaml").write_text(text.replace(before, after))
    with pytest.raises(error, match=words):
        find_tasks(Tasks((name,), str(tmp_path)))


def test_a_process_apart_finds_the_same(folder: Path, tmp_path: Path) -> None:
    import pickle

    manager, names = pickle.loads(find_tasks_apart(Tasks(NAMES, str(folder))))
    assert names == list(NAMES) and set(manager.all_subtasks) == set(NAMES)
    (tmp_path / "tiny_long.yaml").write_text(
        (folder / "tiny_long.yaml").read_text().replace("tiny_long.jsonl", "gone.jsonl")
    )
    with pytest.raises(DataError, match="gone.jsonl"):
        find_tasks_apart(Tasks(("tiny_long",), str(tmp_path)))


def test_a_missing_package_is_named() -> None:
    message = r'pip install "lightning-3d\[eval\]"'
    with (
        mock.patch.object(importlib.util, "find_spec", return_value=None),
        pytest.raises(ConfigError, match=message),
    ):
        require_lm_eval()


def test_a_template_without_a_system_turn_warns_and_leaves_it_out() -> None:
    """As lm-eval's `HFLM`. What a template refuses for another reason is an error."""
    from jinja2.exceptions import TemplateError

    from lightning_3d.app.evaluation.task_model import TaskLM

    def write(turns: list[dict[str, str]], **options: Any) -> str:
        if any(turn["role"] != "user" for turn in turns):
            raise TemplateError("only turns of the user")
        return "".join(turn["content"] for turn in turns)

    model = TaskLM.__new__(TaskLM)
    model.tokenizer = mock.Mock(apply_chat_template=write)
    system, question, answer = (
        {"role": role, "content": role} for role in ("system", "user", "assistant")
    )
    with pytest.warns(UserWarning, match="takes no system turn"):
        assert model.apply_chat_template([system, question]) == "user"
    with pytest.raises(TemplateError):
        model.apply_chat_template([question, answer])
