"""Loss of validation sets and generated text in several layouts, against Transformers on one
process."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import build
from ranks import run_ranks
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from lightning_3d.app.cli.evaluate import evaluate_rank
from lightning_3d.app.config.compose import compose, plain
from lightning_3d.app.evaluation.engine import EvaluationEngine
from lightning_3d.app.evaluation.generation import Sampling, choose, generate, probabilities
from lightning_3d.app.evaluation.job import check
from lightning_3d.app.evaluation.session import Session
from lightning_3d.app.evaluation.subject import Subject, find_subject
from lightning_3d.app.training.data.token_file import write_tokens
from lightning_3d.errors import ConfigError, DataError, LayoutError

LENGTH = 8
# samples that neither dp nor the micro-batch divides
SETS = {"web": 11 * LENGTH + 3, "code": 5 * LENGTH}
VOCABULARY = 67
PROMPTS = [[3, 14, 15, 9], [2, 6, 5, 35, 8, 9, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of Transformers, in float64, with two validation sets."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model: Any = build("llama").to(torch.float64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    for seed, (name, count) in enumerate(SETS.items()):
        tokens = np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.uint16)
        write_tokens(folder / f"{name}.bin", tokens, vocab_size=VOCABULARY, document_separator=4)
    return folder


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def checked(folder: Path, *overrides: str, reads_data: bool = True) -> dict[str, Any]:
    """The complete configuration that ranks get."""
    precision = (
        [] if any(word.startswith("precision=") for word in overrides) else ["precision=fp64"]
    )
    evaluation = check(
        find_subject(folder, str(folder)),
        [*precision, "cluster=local_cpu", *overrides],
        None,
        reads_data=reads_data,
    )
    return evaluation.plan.freeze(plain(evaluation.config))


def sets(folder: Path) -> str:
    return (
        "data.sources={"
        + ",".join(f"{name}:{{val_path:{folder}/{name}.bin}}" for name in SETS)
        + "}"
    )


def data(folder: Path) -> list[str]:
    return [
        "data=blend",
        sets(folder),
        f"data.sequence_length={LENGTH}",
        "data.predict_across_documents=false",
        "data.num_workers=0",
    ]


def run_evaluation(config: dict[str, Any], path: Path) -> None:
    evaluate_rank(config, None, {"about": {}, "json": str(path)})


def mean_loss(folder: Path, name: str) -> tuple[float, int, int]:
    """Loss, target tokens and samples by a plain loop over all samples."""
    tokens = np.fromfile(folder / f"{name}.bin", dtype=np.uint16).astype(np.int64)
    rows = torch.from_numpy(tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH))
    with torch.no_grad():
        logits = reference(folder)(input_ids=rows).logits[:, :-1]
    counted = rows[:, :-1] != 4  # the first token after a separator is no target
    losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(
        counted.shape
    )
    return float(losses[counted].mean()), int(counted.sum()), len(rows)


LAYOUTS = [
    ("dp3", ["parallelism.micro_batch_size=2"]),
    ("tp2_pp2", ["parallelism.loss_chunks=2"]),
    pytest.param("cp2", [], marks=pytest.mark.full),
    pytest.param("pp2_dp2", ["parallelism.zero_stage=3", "precision=fp32"], marks=pytest.mark.full),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "more"), LAYOUTS)
def test_the_loss_of_every_set_equals_a_plain_loop(
    folder: Path, tmp_path: Path, layout: str, more: list[str]
) -> None:
    config = checked(folder, *data(folder), f"parallelism={layout}", *more)
    ranks = math.prod(int(part[-1]) for part in layout.split("_"))
    run_ranks(run_evaluation, ranks, config, tmp_path / "losses.json")
    found = json.loads((tmp_path / "losses.json").read_text())["sets"]
    assert list(found) == list(SETS)
    for name in SETS:
        loss, tokens, samples = mean_loss(folder, name)
        assert (found[name]["tokens"], found[name]["samples"]) == (tokens, samples)
        within = 1e-6 if "precision=fp32" in more else 1e-12
        assert found[name]["loss"] == pytest.approx(loss, rel=within)
        assert found[name]["perplexity"] == pytest.approx(math.exp(loss), rel=10 * within)


def continued(
    config: dict[str, Any], prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[list[int]]:
    session = Session(config, None)
    return session.work(
        lambda trainer: generate(EvaluationEngine(trainer, session.max_length), prompts, sampling)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"), [("tp2_pp2", 4), pytest.param("cp2_dp2", 4, marks=pytest.mark.full)]
)
def test_greedy_text_equals_generate_of_transformers(folder: Path, layout: str, ranks: int) -> None:
    model = reference(folder)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        new = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            use_cache=True,
        )
        expected.append(
            [
                token
                for token in new[0, len(prompt) :].tolist()
                if token != model.config.eos_token_id
            ]
        )
    config = checked(folder, f"parallelism={layout}", reads_data=False)
    sampling = Sampling(max_new_tokens=12, stop=frozenset({model.config.eos_token_id}))
    for found in run_ranks(continued, ranks, config, PROMPTS, sampling):
        assert found == expected


@pytest.fixture(scope="module")
def table_of_positions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with a table of 30 positions, which cp2, that pads to multiples of 4, cannot use
    all."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    sizes = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 30,
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    ).to(torch.float64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def continued_if_it_fits(
    config: dict[str, Any], prompt: list[int], sampling: Sampling
) -> list[int]:
    session = Session(config, None)
    session.require_fits(prompt, sampling.max_new_tokens)
    return session.work(
        lambda trainer: generate(EvaluationEngine(trainer, session.max_length), [prompt], sampling)[
            0
        ]
    )


@pytest.mark.slow
def test_text_is_never_padded_beyond_the_positions(table_of_positions: Path) -> None:
    prompt, config = (
        list(range(3, 23)),
        checked(table_of_positions, "parallelism=cp2", reads_data=False),
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"20 tokens, so 9 new ones are more than the 28 .*30 positions.* Use --max-new-tokens 8"
        ),
    ):
        run_ranks(continued_if_it_fits, 2, config, prompt, Sampling(max_new_tokens=9))
    ids = torch.tensor([prompt])
    new = reference(table_of_positions).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
    )
    for found in run_ranks(continued_if_it_fits, 2, config, prompt, Sampling(max_new_tokens=8)):
        assert found == new[0, len(prompt) :].tolist()[: len(found)] and len(found) == 8


@pytest.mark.slow
def test_sampled_text_is_the_same_on_all_ranks_and_in_all_layouts(folder: Path) -> None:
    sampling = Sampling(max_new_tokens=8, temperature=1.5, top_k=20, seed=3)
    alone = run_ranks(continued, 1, checked(folder, reads_data=False), PROMPTS, sampling)
    several = run_ranks(
        continued, 2, checked(folder, "parallelism=dp2", reads_data=False), PROMPTS, sampling
    )
    assert [*alone, *several] == [alone[0]] * 3
    greedy = run_ranks(
        continued, 1, checked(folder, reads_data=False), PROMPTS, Sampling(max_new_tokens=8)
    )[0]
    assert alone[0] != greedy


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.7), (5, 1.0), (9, 0.5), (1000, 1.0)])
def test_probabilities_are_those_of_transformers(top_k: int | None, top_p: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    expected = logits[None] / 0.8
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = probabilities(logits, Sampling(temperature=0.8, top_k=top_k, top_p=top_p))
    assert torch.allclose(found, expected.softmax(-1)[0], atol=1e-14)


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits, sampling = torch.tensor([0.0, 1.0, 2.0, -1.0]), Sampling(temperature=1.0, top_k=3)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[choose(logits, sampling, generator)] += 1
    assert counts[3] == 0
    # 4 standard deviations of the largest
    assert (counts / 4000 - probabilities(logits, sampling)).abs().max() < 0.03


def scored(config: dict[str, Any], rows: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
    session = Session(config, None)
    return session.work(lambda trainer: EvaluationEngine(trainer, session.max_length).score(rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"), [("tp2_dp2", 4), pytest.param("cp2_pp2", 4, marks=pytest.mark.full)]
)
def test_scores_equal_log_probabilities_on_one_process(
    folder: Path, layout: str, ranks: int
) -> None:
    random, model = np.random.default_rng(5), reference(folder)
    rows = [
        (random.integers(0, VOCABULARY, length).tolist(), scored)
        for length, scored in [(9, 3), (2, 1), (17, 16), (6, 2), (30, 4)]
    ]
    best = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].argmax().item()
    rows.append(([*PROMPTS[0], best], 1))
    expected = []
    for tokens, count in rows:
        with torch.no_grad():
            chances = (
                model(input_ids=torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)[-count:]
            )
        targets = torch.tensor(tokens[-count:])
        expected.append(
            (
                float(chances.gather(1, targets[:, None]).sum()),
                bool((chances.argmax(-1) == targets).all()),
            )
        )
    assert expected[-1][1] and not expected[0][1]
    for found in run_ranks(
        scored, ranks, checked(folder, f"parallelism={layout}", reads_data=False), rows
    ):
        for (total, greedy), (right, is_greedy) in zip(found, expected, strict=True):
            assert total == pytest.approx(right, rel=1e-12) and greedy == is_greedy


REFUSED = {
    "layout": (["parallelism=tp3"], LayoutError, "3"),
    "model": (["model=llama_tiny"], ConfigError, "The model comes from the checkpoint"),
    "sweep": (["parallelism=tp2,pp2"], ConfigError, "with one value"),
    "missing": (
        ["data=tokens", "data.val_path=/no/such", "data.sequence_length=8"],
        DataError,
        "/no/such",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_cannot_work_is_refused_before_ranks_start(folder: Path, case: str) -> None:
    overrides, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        checked(folder, *(data(folder) if case != "missing" else []), *overrides)


def of_run(folder: Path, **changes: dict[str, Any]) -> Subject:
    """A checkpoint whose run had the default configuration, with changes."""
    composed = compose(["cluster=local_cpu", "parallelism=dp1"])
    composed.run_folder = str(folder)
    run = plain(composed)
    return Subject(
        folder, {**run, **{group: {**run[group], **values} for group, values in changes.items()}}
    )


def test_a_run_with_a_batch_ramp_is_evaluated_in_another_layout(tmp_path: Path) -> None:
    ramp = {"from": 1, "step": 1, "tokens": 256}
    subject = of_run(
        tmp_path,
        data={"batch_ramp": ramp, "global_batch_size": 4},
        parallelism={"micro_batch_size": 1},
    )
    assert (
        check(subject, ["parallelism=pp2_dp2"], None, reads_data=True).config.data.batch_ramp
        is None
    )
