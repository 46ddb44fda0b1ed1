"""`lightning-3d verify`: jobs made small, and whether a layout that computes something else is
found."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import models
import pytest
import torch
import torch.nn.functional as F
import yaml
from command_line import REPOSITORY, Result, run_commands, run_here
from starts import in_fresh_process
from sweeps import by_default
from transformers import LlamaConfig

import lightning_3d
from lightning_3d.app.cli.verify import draw_batch
from lightning_3d.app.config.objective import ObjectiveOptions
from lightning_3d.app.verification.differences import LOSS, NORM, WEIGHTS, Comparison
from lightning_3d.app.verification.shrink import (
    MOST_RANKS,
    SEQUENCE,
    fold,
    micro_batches,
    shrink_model,
)
from lightning_3d.errors import ConfigError, Lightning3DError
from lightning_3d.layout import Layout
from lightning_3d.layout.model_rules import ModelSizes, check_model
from lightning_3d.models.families import read_spec
from lightning_3d.parallel.nested import rows_of
from lightning_3d.parallel.pipeline.calls import Calls
from lightning_3d.parallel.pipeline.transport import Transport
from lightning_3d.parallel.tensor import collectives
from lightning_3d.parallel.tensor import resolve_plan as cuts
from lightning_3d.parallel.tensor.collectives import _Copy
from lightning_3d.parallel.zero.backend import DataParallelBackend
from lightning_3d.parallel.zero.reducer import PartialSums
from lightning_3d.parallel.zero.trained import TrainedParameters

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("name", "small", "left_out"),
    [
        ("tp8_pp4_dp8", "tp2_pp2_dp2", []),
        ("tp8_pp4_dp8_cp2", "tp2_pp2_cp2", ["dp"]),
        ("dp64", "dp2", []),
        ("tp4_pp8_vp5_dp2", "tp2_pp2_dp2_vp2", []),
        ("tp2_ep8_dp16", "tp2_dp2_ep2", []),
        ("pp4", "pp2", []),
    ],
)
def test_every_kind_of_axis_stays(name: str, small: str, left_out: list[str]) -> None:
    folded, missing = fold(Layout.parse(name))
    assert folded == Layout.parse(small)
    assert missing == left_out
    assert folded.world_size <= MOST_RANKS


@pytest.mark.parametrize(
    ("name", "small"), [("dp64", "dp4"), ("tp8_dp8", "tp2_dp4"), ("tp8_pp4_dp8", "tp2_pp2_dp2")]
)
def test_two_shard_groups_stay_where_they_fit(name: str, small: str) -> None:
    assert fold(Layout.parse(name), shard_groups=True) == (Layout.parse(small), [])


CONFIGS = sorted(
    path.stem
    for path in (REPOSITORY / "conf" / "model").glob("*.yaml")
    if path.stem != "pretrained"
)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", ["tp8_pp4_dp8", "tp2_pp2_cp2"])
def test_published_models_become_small_ones_that_fit(name: str, layout: str) -> None:
    from lightning_3d.app.training.module import transformers_config

    config = yaml.safe_load((REPOSITORY / "conf" / "model" / f"{name}.yaml").read_text())["config"]
    big = Layout.parse(layout)
    folded, _ = fold(big)
    small = shrink_model(config, big, folded)
    spec, before = read_spec(small), read_spec(config)
    sizes = ModelSizes(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        layers=spec.layers,
        vocab=spec.vocab,
        intermediate=spec.intermediate,
        max_positions=spec.max_positions,
        experts=spec.experts or None,
    )
    check_model(folded, sizes, sequence_length=SEQUENCE, sequence_parallel=True)
    transformers_config(small)
    assert (spec.model_type, spec.tied, bool(spec.experts)) == (
        before.model_type,
        before.tied,
        bool(before.experts),
    )
    assert {window is None for window in spec.windows} == {
        window is None for window in before.windows
    }
    assert (spec.kv_heads < folded.tp) == (
        before.kv_heads < big.tp
    ) or before.kv_heads == before.heads
    assert spec.hidden <= 512 and spec.layers <= 9


def test_schedules_get_enough_micro_batches() -> None:
    assert micro_batches("1F1B", Layout.parse("pp2_dp2")) == 4
    assert micro_batches("Interleaved1F1B", Layout.parse("pp2_vp2")) == 8
    assert micro_batches("1F1B", Layout.parse("dp2")) == 2


class Own(pl.LightningModule):
    """A module as a user has it, whose loss may depend on the rank, which no layout can hide."""

    def __init__(self, slip: float = 0.0) -> None:
        super().__init__()
        self.model: Any = None
        self.slip = slip

    def configure_model(self) -> None:
        if self.model is None:
            self.model = models.build(models.PLAIN, 4)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return models.plain_step(self.model, batch) * (1 + self.slip * self.global_rank)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


class OfPairs(Own):
    """Its batches are pairs, as a TensorDataset makes them."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, targets = batch
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def own_batches(steps: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [models.plain_data(8, models.PlainModel.vocabulary, generator) for _ in range(steps)]


def verified(slip: float, strategy: dict[str, Any]) -> Comparison:
    return lightning_3d.verify(Own(slip), strategy, own_batches())


def pairs_verified(strategy: dict[str, Any]) -> Comparison:
    pairs = [(batch["tokens"][:, :-1], batch["tokens"][:, 1:]) for batch in own_batches()]
    return lightning_3d.verify(OfPairs(), strategy, pairs)


@pytest.mark.slow
@pytest.mark.parametrize("warm", by_default([True, False], 0), ids=["forked", "fresh interpreters"])
def test_own_module(warm: bool) -> None:
    strategy = {"layout": "tp2_pp2", "plan": models.PlainModel.plan, "micro_batch_size": 2}
    found = in_fresh_process(pairs_verified, strategy) if warm else verified(0.0, strategy)
    assert found.same, found
    assert (
        found.weight > 0
        and len(found.losses) == 2
        and found.largest.keys() >= {LOSS, NORM, WEIGHTS}
    )


class Noisy(Own):
    """Its step draws random numbers for its rows, and its loss may have a term that each rank
    computes for itself."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        rows = len(batch["tokens"])
        losses = models.plain_token_losses(self.model, batch).view(rows, -1)
        return (losses * torch.rand(rows, 1)).mean() * (1 + self.slip * self.global_rank)


def noisy_verified(slip: float) -> Comparison:
    return lightning_3d.verify(
        Noisy(slip),
        {"layout": "pp2", "plan": models.PlainModel.plan, "micro_batch_size": 2},
        own_batches(),
    )


@pytest.mark.slow
def test_the_step_draws_the_same_random_numbers_both_ways() -> None:
    right, wrong = in_fresh_process(noisy_verified, 0.0), in_fresh_process(noisy_verified, 1e-3)
    assert right.same and right.loss < 1e-5, right
    assert not wrong.same and wrong.found[0].what == LOSS and wrong.found[0].step == 1, wrong


@pytest.mark.slow
def test_what_differs_is_found() -> None:
    strategy = {"layout": "dp2", "micro_batch_size": 2}
    found = in_fresh_process(verified, 0.01, strategy)
    assert not found.same
    assert 1e-3 < found.loss < 1e-2, "half of the rows weigh one percent more"
    assert "allowed" in str(found)


def test_batches_that_ranks_cannot_share_are_refused() -> None:
    strategy = {"layout": "dp2"}
    short, rows = own_batches(1)[0], torch.zeros(6, 2)
    for batches, words in (
        ([], "one global batch for each step"),
        ([(rows, rows[:4])], "batch 0 has tensors with 4 and 6 rows"),
        ([rows, {"x": rows[:3]}], "divisible by dp=2; batch 1 has tensors with 3 rows"),
        ([{"x": "no tensor"}], "batch 0 has no tensors"),
    ):
        with pytest.raises(ConfigError, match=words):
            lightning_3d.verify(Own(), strategy, batches)
    assert rows_of([short, (rows,)], slice(0, None, 2))[1][0].shape == (3, 2)


@pytest.mark.full
def test_example_with_a_large_learning_rate() -> None:
    found = in_fresh_process(example_verified)
    assert found.same, found


def example_verified() -> Comparison:
    path = REPOSITORY / "examples" / "custom_module.py"
    spec = importlib.util.spec_from_file_location("custom_module", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    tensors = example.clusters(32).tensors
    batches = [[tensor[start : start + 16] for tensor in tensors] for start in (0, 16)]
    return lightning_3d.verify(
        example.Module(), {"layout": "tp2_pp2", "plan": example.PLAN}, batches
    )


@pytest.mark.full
def test_what_a_run_refuses_is_refused() -> None:
    assert in_fresh_process(refused, {"layout": "pp2"}).startswith(
        "Plain (the 'model' of Own) declares no parallel plan"
    )


def refused(strategy: dict[str, Any]) -> str:
    with pytest.raises(Lightning3DError) as error:
        verified(0.0, strategy)
    return str(error.value)


def forget_norms() -> None:
    PartialSums.reduce = lambda *args: None  # type: ignore[method-assign]


def forget_tied_copies() -> None:
    PartialSums.reduce_tied = lambda *args: None  # type: ignore[method-assign]


def forget_backward_sum() -> None:
    _Copy.backward = staticmethod(lambda ctx, gradient: (gradient, None, None))


def forget_forward_sum() -> None:
    collectives.reduce_scatter_flat = lambda part, whole, group: SimpleNamespace(
        wait=lambda: part.copy_(whole[: len(part)])
    )


def cut_packed_layers_in_one() -> None:
    cuts._packed_mlp = lambda owner, tp_size: (
        cuts.Cut("packed_colwise", parts=(owner.gate_up_proj.out_features,)),
        cuts.Cut("rowwise"),
    )


def halve_gradients() -> None:
    whole = DataParallelBackend.reduce
    DataParallelBackend.reduce = lambda self, scale: whole(self, scale * 0.5)  # type: ignore[method-assign]


def count_replicas() -> None:
    TrainedParameters.counts = lambda self, entry: True  # type: ignore[method-assign]


def lose_a_message() -> None:
    send = Transport.send
    Transport.send = lambda self, message, tensor: send(
        self, message, tensor * (message.forward or message.micro_batch > 0)
    )  # type: ignore


def send_chosen_answers_twice() -> None:
    pack = Calls.pack
    Calls.pack = lambda self, sent: pack(self, [sent[0]] * len(sent))  # type: ignore


FAULTS = [
    (forget_norms, "parallelism=tp2"),
    (forget_tied_copies, "parallelism=pp2 model=gemma3_tiny"),
    (forget_backward_sum, "parallelism=tp2 parallelism.sequence_parallel=false"),
    (forget_forward_sum, "parallelism=tp2"),
    (cut_packed_layers_in_one, "parallelism=tp2 model=phi3_tiny"),
    (halve_gradients, "parallelism=dp2 trainer.gradient_clip_val=null"),
    (count_replicas, "parallelism=tp2 parallelism.zero_stage=0"),
    (lose_a_message, "parallelism=pp2"),
    (send_chosen_answers_twice, "recipe=llama_tiny_dpo_2xcpu"),
]


def broken(fault: Callable[[], None], overrides: str) -> Result:
    fault()
    [result] = run_here([["verify", "--steps", "2", *overrides.split()]])
    return result


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "overrides"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS]
)
def test_a_wrong_rewrite_is_found(fault: Callable[[], None], overrides: str) -> None:
    result = in_fresh_process(broken, fault, overrides)
    found = {
        1: "MISMATCH: this layout does not reproduce one process",
        2: "differs between the tensor-parallel ranks",
    }
    assert result.code in found and found[result.code] in result.output, result.output


LINES = {
    "small": ["verify", "--steps", "2", "parallelism=tp2_dp2"],
    "steps": ["verify", "--steps=0"],
    "option": ["verify", "--json=x"],
    "layout": ["verify", "parallelism=tp3"],
    "teacher": ["verify", "recipe=llama_tiny_distill_2xcpu"],
    "help": ["verify", "--help"],
}


@pytest.mark.slow
def test_command_lines(tmp_path: Path) -> None:
    quick = ["help", "steps", "option", "layout", "teacher"]
    results = dict(zip(quick, run_commands([LINES[name] for name in quick]), strict=True))
    assert results["help"].code == 0 and "--steps N" in results["help"].output
    option = "lightning-3d verify has no option --json"
    teacher = "This run needs a teacher. Set objective.teacher=FOLDER."
    refusals = {
        "steps": "at least 1; got 0",
        "option": option,
        "layout": "Tensor parallelism assigns",
        "teacher": teacher,
    }
    for name, words in refusals.items():
        result = results[name]
        assert (result.code, result.torch, result.left) == (2, False, []), result.output
        assert result.output.startswith("lightning_3d: ") and words in result.output
        assert result.output.count("\n") == 1
    [small] = run_commands([LINES["small"]], warm=True)
    assert small.code == 0, small.output
    assert "MATCH: this layout reproduces one process: tp2_dp2" in small.output
    assert small.left == []


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        "model=mixtral_8x7b parallelism=tp4_pp4_ep4_dp4 cluster=h100_8x8 data.global_batch_size=64",
        (
            "model=llama3_70b parallelism=tp8_pp4_dp8 cluster=h100_32x8 data.global_batch_size=64"
            " parallelism.zero_stage=3"
        ),
        "model=gemma3_tiny parallelism=tp2_pp2_dp2 parallelism.schedule=zbvzerobubble",
        "model=deepseek_v3_tiny parallelism=tp2_ep2_dp4 parallelism.zero_stage=2",
        "model=deepseek_v3_tiny model.mtp_layers=2 parallelism=pp2_cp2_dp2",
        "parallelism=tp2_dp8 parallelism.zero_stage=3 parallelism.zero_shard_size=4",
        (
            "model=mixtral_8x7b parallelism=dp16_ep4 cluster=h100_2x8 data.global_batch_size=64"
            " parallelism.zero_stage=3 parallelism.zero_shard_size=8"
        ),
        (
            "model=llama3_1_8b parallelism=cp4_dp2 cluster=h100_1x8 parallelism.zero_stage=2"
            " data.sequence_length=1024 parallelism.recompute=full"
        ),
        "recipe=llama_tiny_dpo_2xcpu parallelism=tp2_pp2",
        (
            "recipe=llama_tiny_dpo_2xcpu parallelism=pp2_dp2 parallelism.zero_stage=3"
            " parallelism.schedule=gpipe"
        ),
    ],
)
def test_jobs(overrides: str) -> None:
    [result] = run_commands([["verify", *overrides.split()]], timeout=500)
    assert result.code == 0, result.output


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2_dp2", "tp2_cp2"])
def test_a_teacher_is_made_small_from_its_configuration(tmp_path: Path, layout: str) -> None:
    LlamaConfig(vocab_size=257, num_hidden_layers=6, hidden_size=512).save_pretrained(tmp_path)
    line = [
        "verify",
        "recipe=llama_tiny_distill_2xcpu",
        f"objective.teacher={tmp_path}",
        f"parallelism={layout}",
    ]
    [result] = run_commands([line], timeout=500)
    assert result.code == 0, result.output
    assert (
        "with a frozen teacher" in result.output
        and f"MATCH: this layout reproduces one process: {layout}" in result.output
    )


def test_pairs_have_one_prompt_and_answers_of_different_lengths() -> None:
    batch = draw_batch(ObjectiveOptions("dpo"), 6, 64, torch.Generator().manual_seed(0))
    ids, labels, rejected_ids, rejected_labels = (
        batch[key] for key in ("input_ids", "labels", "rejected_ids", "rejected_labels")
    )
    prompt = labels == -100
    assert (prompt == (rejected_labels == -100)).all() and len(set(prompt.sum(1).tolist())) > 1
    assert (ids == rejected_ids)[prompt].all() and not (ids == rejected_ids)[~prompt].all()
    assert (labels == ids)[~prompt].all() and (rejected_labels == rejected_ids)[~prompt].all()
    plain = draw_batch(ObjectiveOptions(), 6, 64, torch.Generator().manual_seed(0))
    assert plain.keys() == {"input_ids", "labels"} and plain["labels"].equal(labels)
