"""Context parallelism equals one process: ring and Ulysses, packed or not, alone and with the other
axes; and what is refused.

``pytest`` runs some combinations, ``pytest -m full`` all.
"""

from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import models
import parity
import pytest
import torch
import torch.distributed as dist
from context_batches import BATCHES, KINDS, train_batches, world_size
from models import IGNORE, SEQUENCE, Batch
from parity import Module, Rows, assert_same_run, fit_on_rank, quiet_trainer
from ranks import run_ranks
from reference import Recipe, cut, data, initial_model, row_count, split, target_count, train_on
from sweeps import by_default
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_3d.errors import ConfigError, DataError, LayoutError, PlanError
from lightning_3d.layout import Layout
from lightning_3d.parallel.context import ContextParallel, zigzag
from lightning_3d.parallel.context.attention import Running, make_mask, running
from lightning_3d.parallel.context.masks import Mask
from lightning_3d.strategy import Lightning3DStrategy

LAYOUTS = ("cp2", "cp4", "tp2_cp2", "pp2_cp2", "cp2_dp2", "tp2_pp2_cp2", "cp4_dp2", "tp2_cp2_dp2")


def assert_same_with(
    batches: str,
    model: str,
    layout: str,
    kind: str,
    dtype: str = "float64",
    zero: int = 0,
    **strategy: Any,
) -> None:
    """As ``parity.assert_same_training``, with documents or padding in the batches."""
    recipe = Recipe(model, dtype=dtype)
    micro_batch = recipe.global_batch // Layout.parse(layout).dp // (2 * Layout.parse(layout).pp)
    whole = BATCHES[batches](recipe)
    expected = train_on(
        recipe, [split(part, micro_batch) for part in split(whole, recipe.global_batch)]
    )
    arguments = {
        "layout": layout,
        "cp_kind": kind,
        "micro_batch_size": micro_batch,
        "zero_stage": zero,
        **strategy,
    }
    assert_same_run(
        run_ranks(train_batches, world_size(layout), recipe, batches, timeout=180, **arguments),
        expected,
        dtype,
    )


@pytest.mark.parametrize(
    ("model", "layout", "kind", "zero", "dtype"),
    by_default(
        [
            ("llama", "cp4", "ring", 0, "float64"),
            ("gpt_neox", "cp4", "ulysses", 0, "float64"),
            ("qwen3", "tp2_cp2", "ulysses", 0, "float64"),
            ("gemma3", "pp2_cp2", "ring", 0, "float64"),
            ("mistral", "cp2_dp2", "ring", 1, "float32"),
            ("phi3", "tp2_pp2_cp2", "ring", 1, "float32"),
        ],
        2,
        3,
    ),
)
def test_same_as_one_process(model: str, layout: str, kind: str, zero: int, dtype: str) -> None:
    parity.assert_same_training(model, layout, zero=zero, dtype=dtype, cp_kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "model", "layout", "kind", "zero", "dtype"),
    by_default(
        [
            ("packed", "llama", "cp4", "ring", 0, "float64"),
            ("packed", "mistral", "tp2_cp2", "ulysses", 0, "float64"),
            ("packed", "gemma3", "cp2_dp2", "ring", 1, "float32"),
            ("packed", "qwen2", "pp2_cp2", "ring", 0, "float64"),
            ("padded", "llama", "cp2_dp2", "ring", 0, "float64"),
            ("padded", "gemma3", "cp2", "ulysses", 0, "float64"),
        ],
        0,
        5,
    ),
)
def test_same_with_documents_and_padding(
    batches: str, model: str, layout: str, kind: str, zero: int, dtype: str
) -> None:
    assert_same_with(batches, model, layout, kind, dtype, zero)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("model", "layout"), list(product(models.FAMILIES, LAYOUTS)))
def test_every_family(model: str, layout: str, kind: str) -> None:
    zero = 1 if "dp2" in layout else 0
    parity.assert_same_training(
        model, layout, zero=zero, dtype="float32" if zero else "float64", cp_kind=kind
    )


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batches", "model", "layout"),
    list(product(("packed", "padded"), models.FAMILIES, LAYOUTS[1:5])),
)
def test_every_family_with_documents_and_padding(
    batches: str, model: str, layout: str, kind: str
) -> None:
    zero = 1 if "dp2" in layout else 0
    assert_same_with(batches, model, layout, kind, "float32" if zero else "float64", zero)


@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    by_default(
        [
            ("tp2_cp2", False),
            ("tp2_cp2", True),
            ("tp2_pp2_cp2", False),
            ("tp2_pp2_cp2", True),
            ("tp4_cp2", True),
        ]
    ),
)
def test_with_sequence_parallelism_and_without(layout: str, sequence_parallel: bool) -> None:
    parity.assert_same_training(
        "llama", layout, dtype="float64", sequence_parallel=sequence_parallel
    )


@pytest.mark.full
def test_tokens_that_tensor_parallel_ranks_do_not_divide() -> None:
    """Four ranks share six."""
    assert_same_with("twelve", "llama", "tp4_cp2", "ring")


@pytest.mark.full
@pytest.mark.parametrize("schedule", parity.SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule(schedule: str, kind: str) -> None:
    parity.assert_same_training("llama", "pp2_cp2", schedule, dtype="float64", cp_kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("zero", by_default([2, 3], 1))
def test_zero_deals_to_context_ranks_too(zero: int) -> None:
    parity.assert_same_training("llama", "cp2_dp2", zero=zero)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    by_default(
        [
            {"recompute": "full"},
            {"recompute": "selective"},
            {"recompute": "full", "offload_activations": True},
        ],
        1,
    ),
    ids=["full", "selective", "offloaded"],
)
def test_blocks_run_twice(options: dict[str, Any]) -> None:
    parity.assert_same_training("gemma3", "cp2", dtype="float64", **options)


# Steps as people write them


class OwnLoss(Module):
    """A loss from logits, numbers of all kinds, and predictions."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.targets = SumMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss_of(batch)

    def loss_of(self, batch: Batch) -> Tensor:
        assert self.model is not None
        logits = self.model(input_ids=batch["input_ids"]).logits
        return squared(logits, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        assert self.model is not None
        out = self.model(**batch)
        self.log("perplexity", out.loss.exp())
        self.targets((batch["labels"][:, 1:] != IGNORE).sum())
        self.log("targets", self.targets)
        self.log("rows", float(len(batch["labels"])), reduce_fx="sum")
        self.log("largest", out.logits.max(), reduce_fx="max")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor | list[Tensor]:
        assert self.model is not None
        logits = self.model(input_ids=batch["input_ids"]).logits
        return [logits] if self.in_lists else logits

    in_lists = False


def squared(logits: Tensor, batch: Batch) -> Tensor:
    """Something that is no mean over tokens."""
    losses = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(logits), -1).mean(1).square().mean()


RECIPE = Recipe(dtype="float64")


def fit_own_loss(**strategy: Any) -> parity.Part:
    return fit_on_rank(RECIPE, Rows(data(RECIPE)), OwnLoss(RECIPE), **strategy)


@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(["cp2_dp2", "tp2_cp2", "cp2"], 2))
def test_a_loss_of_the_users_own_sees_all_tokens(layout: str) -> None:
    whole = data(RECIPE)
    expected = train_on(
        RECIPE,
        [split(part, 4) for part in split(whole, RECIPE.global_batch)],
        step=lambda model, batch: squared(model(input_ids=batch["input_ids"]).logits, batch),
    )
    assert_same_run(
        run_ranks(fit_own_loss, world_size(layout), layout=layout, micro_batch_size=4),
        expected,
        "float64",
    )


class OwnFunction(Module):
    """A loss function in the place of the model's."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        self.model.loss_function = two_tokens_on  # type: ignore[assignment]


def two_tokens_on(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    losses = nn.functional.cross_entropy(
        logits[:, :-2].reshape(-1, vocab_size), labels[:, 2:].flatten(), ignore_index=IGNORE
    )
    return losses.square()


def fit_own_function(**strategy: Any) -> parity.Part:
    return fit_on_rank(RECIPE, Rows(data(RECIPE)), OwnFunction(RECIPE), **strategy)


@pytest.mark.slow
def test_a_loss_function_of_the_users_own_sees_all_tokens() -> None:
    batches = [split(part, 4) for part in split(data(RECIPE), RECIPE.global_batch)]
    vocab = models.vocabulary("llama")
    step = lambda model, batch: two_tokens_on(  # noqa: E731
        model(input_ids=batch["input_ids"]).logits, batch["labels"], vocab
    )
    expected = train_on(RECIPE, batches, step)
    assert_same_run(
        run_ranks(fit_own_function, 4, layout="tp2_cp2", micro_batch_size=4), expected, "float64"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", by_default(KINDS, 0))
def test_chunks_of_one_token(kind: str) -> None:
    assert_same_with("short", "llama", "cp4", kind)


def predict_in_lists() -> float:
    """One rank alone looks at what was predicted."""
    module = OwnLoss(RECIPE)
    module.in_lists = True
    trainer = quiet_trainer(strategy=Lightning3DStrategy("tp2_cp2"), devices=4, precision="64-true")
    [[logits]] = trainer.predict(module, DataLoader(Rows(cut(data(RECIPE), 0, 2)), batch_size=2))  # type: ignore[misc]
    return logits.sum().item() if dist.get_rank() == 0 else 0.0


def test_predictions_in_lists_are_whole_when_the_step_is_over() -> None:
    expected = initial_model(RECIPE)(input_ids=data(RECIPE)["input_ids"][:2]).logits.sum().item()
    assert run_ranks(predict_in_lists, 4)[0] == pytest.approx(expected, rel=1e-9)


class WithoutPlan(parity.Module):
    """GPT-2, for which Transformers declares no plan at all."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = small_gpt2()


def small_gpt2() -> nn.Module:
    sizes = {
        "vocab_size": models.vocabulary("llama"),
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": SEQUENCE,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))


def fit_without_plan(**strategy: Any) -> parity.Part:
    return fit_on_rank(RECIPE, Rows(data(RECIPE)), WithoutPlan(RECIPE), **strategy)


@pytest.mark.parametrize("layout", by_default(["cp2", "cp2_dp2"], 0))
def test_a_model_without_a_plan(layout: str) -> None:
    with patch.object(models, "build", lambda *args: small_gpt2()):
        expected = train_on(
            RECIPE, [split(part, 4) for part in split(data(RECIPE), RECIPE.global_batch)]
        )
    assert_same_run(
        run_ranks(fit_without_plan, world_size(layout), layout=layout, micro_batch_size=4),
        expected,
        "float64",
    )


def evaluate_on_rank(**strategy: Any) -> tuple[dict[str, float], list[Tensor]]:
    rows = Rows(cut(data(RECIPE), 0, 6))
    trainer = quiet_trainer(
        strategy=Lightning3DStrategy(**strategy), devices=4, precision="64-true"
    )
    module = OwnLoss(RECIPE)
    [found] = trainer.validate(module, DataLoader(rows, batch_size=2), verbose=False)
    predictions: Any = trainer.predict(module, DataLoader(rows, batch_size=2))
    return found, predictions


@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(["cp4", "pp2_cp2"], 1))
def test_logged_numbers_and_predictions_are_the_true_ones(layout: str) -> None:
    batch = cut(data(RECIPE), 0, 6)
    model = initial_model(RECIPE)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
        losses = [models.causal_token_losses(model, part).mean() for part in split(batch, 2)]
    weights = torch.tensor(
        [target_count("llama", part) for part in split(batch, 2)], dtype=torch.float64
    )
    perplexity = (torch.stack(losses).exp() * weights).sum() / weights.sum()
    for found, predictions in run_ranks(evaluate_on_rank, 4, layout=layout):
        assert found["perplexity"] == pytest.approx(perplexity.item(), rel=1e-6)
        assert (found["rows"], found["targets"]) == (row_count(batch), target_count("llama", batch))
        assert found["largest"] == pytest.approx(logits.max().item(), rel=1e-6)
        assert (torch.cat(predictions) - logits).abs().max() < 1e-10


def validate_by_both_kinds() -> list[tuple[float, str]]:
    module, found = OwnLoss(RECIPE), []
    for kind in KINDS:
        trainer = quiet_trainer(
            strategy=Lightning3DStrategy("cp2", cp_kind=kind), devices=2, precision="64-true"
        )
        [logged] = trainer.validate(
            module, DataLoader(Rows(cut(data(RECIPE), 0, 4)), batch_size=2), verbose=False
        )
        found.append((logged["perplexity"], module.model.context_parallel.kind))  # type: ignore[union-attr]
    return found


def test_another_trainer_may_take_another_kind() -> None:
    for (first, ring), (second, ulysses) in run_ranks(validate_by_both_kinds, 2):
        assert (first, ring, ulysses) == (pytest.approx(second, rel=1e-6), "ring", "ulysses")


def save_and_load(folder: str, save: bool, **strategy: Any) -> parity.Part:
    """An epoch of two steps and a checkpoint, or the second epoch from it."""
    recipe = Recipe(steps=4, dtype="float32")
    module, values = Module(recipe), parity.StepValues()
    plan = Lightning3DStrategy(**strategy, seed=0, micro_batch_size=4)
    assert plan.layout is not None
    trainer = quiet_trainer(
        strategy=plan,
        devices=plan.layout.world_size,
        max_epochs=1 if save else 2,
        callbacks=[values],
    )
    loader = parity.Data(
        Rows(cut(data(recipe), 0, 2 * recipe.global_batch)), recipe.global_batch // plan.layout.dp
    )
    trainer.fit(module, datamodule=loader, ckpt_path=None if save else f"{folder}/saved")
    if save:
        trainer.save_checkpoint(f"{folder}/saved")
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return parity.Part(values.losses, values.grad_norms, weights, dict(plan.specs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "zero"),
    by_default([("cp2", "dp2", 1), ("dp2", "cp2_pp2", 0), ("cp2_dp2", "cp4", 3)], 0),
)
def test_a_checkpoint_goes_to_another_layout(
    first: str, second: str, zero: int, tmp_path: Path
) -> None:
    recipe = Recipe(steps=4, dtype="float32", clip=1e9)
    epoch = [
        split(part, 4)
        for part in split(cut(data(recipe), 0, 2 * recipe.global_batch), recipe.global_batch)
    ]
    expected = train_on(recipe, [*epoch, *epoch])
    run_ranks(save_and_load, world_size(first), str(tmp_path), True, layout=first, zero_stage=zero)
    parts = run_ranks(
        save_and_load, world_size(second), str(tmp_path), False, layout=second, zero_stage=zero
    )
    error, drift = parity.differences(parts, train_from(expected, 2))
    assert drift == 0.0 and error.within(parity.limits("float32"))


def train_from(run: Any, first: int) -> Any:
    return type(run)(run.losses[first:], run.grad_norms[first:], run.weights)


# What is refused


@pytest.mark.parametrize(("length", "near"), by_default([(18, "24"), (3, "8")], 1))
def test_f12_a_sequence_that_cannot_be_cut(length: int, near: str) -> None:
    with pytest.raises(
        DataError,
        match=(
            f"2 \\* cp = 8 equal chunks, but this batch has sequences of {length} tokens.*for"
            f" example {near}"
        ),
    ):
        run_ranks(train_short, 4, length, layout="cp4")


def train_short(length: int, **strategy: Any) -> Any:
    batch = cut(data(Recipe()), 0, 4)
    batch = {key: value.repeat(1, 2)[:, :length] for key, value in batch.items()}
    return fit_on_rank(
        Recipe(steps=1, global_batch=4), Rows(batch), Module(Recipe(layers=1)), **strategy
    )


def test_ulysses_with_fewer_heads_than_ranks() -> None:
    with pytest.raises(
        LayoutError, match="tp \\* cp = 8 ranks .* the model's 4 heads. Use cp_kind=ring"
    ):
        run_ranks(parity.train_on_rank, 8, Recipe(steps=1), layout="tp2_cp4", cp_kind="ulysses")


@pytest.mark.parametrize("plan", [models.PlainModel.plan, None], ids=["planned", "no plan"])
def test_a_model_that_is_not_of_transformers(plan: Any) -> None:
    with pytest.raises(
        PlanError,
        match="replaces the attention of .*(and PlainModel is not one|but Module has none)",
    ):
        run_ranks(parity.train_on_rank, 2, Recipe(models.PLAIN, steps=1), layout="cp2", plan=plan)


def train_on_different_rows() -> None:
    recipe = Recipe(steps=1, global_batch=4)
    batch = {key: value[dist.get_rank() :][:4] for key, value in data(recipe).items()}
    fit_on_rank(recipe, Rows(batch), Module(recipe), layout="cp2")


def test_ranks_that_share_a_sequence_read_the_same_batch() -> None:
    with pytest.raises(DataError, match="other tp, cp or pp index\\) read different batches"):
        run_ranks(train_on_different_rows, 2)


def test_wrong_kinds() -> None:
    with pytest.raises(
        ConfigError, match='cp_kind must be ring or ulysses; got "Ring". Did you mean "ring"'
    ):
        Lightning3DStrategy("cp2", cp_kind="Ring")


class Changed(Module):
    """A model whose configuration is changed, or which is called with more."""

    def __init__(self, recipe: Recipe, config: dict[str, Any], call: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.changes, self.call = config, call

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        for name, value in self.changes.items():
            setattr(self.model.config, name, value)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(**batch, **self.call).loss


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "dropout": ({"attention_dropout": 0.1}, {}, ConfigError, "attention_dropout=0.1"),
    "a cache": ({}, {"use_cache": True}, ConfigError, "use_cache"),
    "the last logits": ({}, {"logits_to_keep": 1}, ConfigError, "logits_to_keep"),
    "a mask of its own": (
        {},
        {"attention_mask": torch.zeros(4, 1, SEQUENCE, SEQUENCE)},
        PlanError,
        "must be a padding mask",
    ),
    "positions in three dimensions": (
        {},
        {"position_ids": torch.zeros(3, 4, SEQUENCE)},
        PlanError,
        "position_ids must have shape",
    ),
}


def train_changed(config: dict[str, Any], call: dict[str, Any]) -> None:
    recipe = Recipe(steps=1, global_batch=4)
    fit_on_rank(
        recipe,
        Rows(cut(data(recipe), 0, 4)),
        Changed(recipe, config, call),
        layout="cp2",
        micro_batch_size=4,
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_model_may_not_have_or_get(name: str) -> None:
    config, call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        run_ranks(train_changed, 2, config, call)


@pytest.mark.parametrize(
    "how",
    [{"q_length": 4, "q_offset": 0}, {"cache_position": torch.arange(4)}],
    ids=["length", "places"],
)
def test_masks_are_made_as_every_version_of_transformers_asks(how: dict[str, Any]) -> None:
    """5.2 names the places of the queries, 5.17 and later their number."""
    context: Any = ContextParallel(None, 2, 0)  # type: ignore[arg-type]
    call = Running(Mask(context, 8), zigzag.positions(8, 2, 0).unsqueeze(0), 1, {})
    seen = lambda row, head, q, k: (k <= q) & (q - k < 3)  # noqa: E731
    with running(call):
        mask = make_mask(
            batch_size=1, kv_length=4, kv_offset=0, mask_function=seen, local_size=3, **how
        )
    assert (mask.window, mask.length, mask.documents) == (3, 8, None)


def train_a_part() -> None:
    class Part(Module):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            assert self.model is not None
            return self.model.model(batch["input_ids"]).last_hidden_state.mean()  # type: ignore[operator, union-attr]

    recipe = Recipe(steps=1, global_batch=4)
    fit_on_rank(recipe, Rows(cut(data(recipe), 0, 4)), Part(recipe), layout="cp2")


def test_a_part_of_the_model_alone() -> None:
    with pytest.raises(PlanError, match="The step called only a part of the model"):
        run_ranks(train_a_part, 2)
