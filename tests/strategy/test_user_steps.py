"""Steps as people write them: other argument names, outputs beside the loss, metrics, a second
Trainer, frozen parts."""

import contextlib
import io
import warnings
from typing import Any

import lightning.pytorch as pl
import models
import parity
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from parity import Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, cut, data, initial_model, target_count
from sweeps import by_default
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchmetrics import MeanMetric
from torchmetrics.retrieval import RetrievalMRR

from lightning_3d.errors import ConfigError, PlanError

ROWS, BATCH = 13, 4  # the last batches are short, and with two data ranks one row is repeated
RECIPE = Recipe(steps=2)


class Sees(pl.Callback):
    """What callbacks get as outputs."""

    def __init__(self) -> None:
        self.trained: list[Any] = []
        self.validated: list[Any] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any
    ) -> None:
        self.trained.append(
            {key: float(value) for key, value in outputs.items() if value.ndim == 0}
        )

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any
    ) -> None:
        self.validated.append(float(outputs["val_loss"]))


class Steps(Module):
    """Names of its own, and more than a loss."""

    def training_step(self, batch: models.Batch, _: int) -> dict[str, Tensor]:
        assert self.model is not None
        out = self.model(**batch)
        return {
            "loss": out.loss,
            "largest": out.logits.max().detach(),
            "logits": out.logits.detach(),
        }

    def validation_step(self, batch: models.Batch) -> dict[str, Tensor]:
        assert self.model is not None
        loss = self.model(**batch).loss
        self.log("val_loss", loss)
        return {"val_loss": loss}


class NumberedSteps(Steps):
    """An index under another name, and two loaders."""

    def validation_step(
        self, batch: models.Batch, i: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:  # type: ignore[override]
        return super().validation_step(batch)


def rows() -> Rows:
    """Some of the targets are left out, so that rows differ in weight."""
    batch = cut(data(RECIPE), 0, ROWS)
    for row in range(0, ROWS, 2):
        batch["labels"][row, : 2 + row] = models.IGNORE
    return Rows(batch)


def loss_of(batch: models.Batch) -> tuple[float, int]:
    """(mean loss, target tokens) on one process."""
    with torch.no_grad():
        return models.causal_token_losses(initial_model(RECIPE), batch).mean().item(), target_count(
            "llama", batch
        )


def strategy_trainer(
    layout: str, callbacks: list[pl.Callback] | None = None, max_epochs: int = 1, **strategy: Any
) -> pl.Trainer:
    from lightning_3d.strategy import Lightning3DStrategy

    plan = Lightning3DStrategy(layout, **{"micro_batch_size": 1} | strategy)
    assert plan.layout is not None
    return quiet_trainer(
        strategy=plan,
        devices=plan.layout.world_size,
        max_epochs=max_epochs,
        callbacks=callbacks or [],
    )


def validate(layout: str, numbered: bool) -> tuple[list[float], list[float]]:
    seen = Sees()
    loaders = [DataLoader(rows(), batch_size=BATCH) for _ in range(1 + numbered)]
    module = NumberedSteps(RECIPE) if numbered else Steps(RECIPE)
    found = strategy_trainer(layout, [seen]).validate(
        module, loaders if numbered else loaders[0], verbose=False
    )
    return [value for metrics in found for value in metrics.values()], seen.validated


@pytest.mark.parametrize("numbered", by_default([False, True], 1), ids=["no_index", "named_i"])
@pytest.mark.parametrize(
    ("layout", "ranks"), by_default([("pp2_dp2", 4), ("dp2", 2), ("pp2", 2)], 0)
)
def test_steps_need_not_be_called_batch_idx(layout: str, ranks: int, numbered: bool) -> None:
    """A row that the sampler repeats counts once whether or not the step takes an index."""
    expected, _ = loss_of(rows().batch)
    for logged, _ in run_ranks(validate, ranks, layout, numbered):
        assert logged == pytest.approx([expected] * len(logged), rel=1e-5)
        assert len(logged) == 1 + numbered


def test_returned_numbers_are_weighted_as_the_loss_is() -> None:
    whole = rows().batch
    expected = [loss_of(cut(whole, start, BATCH))[0] for start in range(0, ROWS, BATCH)]
    for _, returned in run_ranks(validate, 2, "pp2", False):
        assert returned == pytest.approx(expected, rel=1e-5)


def train_with_extras(layout: str) -> list[dict[str, float]]:
    seen = Sees()
    strategy_trainer(layout, [seen]).fit(Steps(RECIPE), DataLoader(rows(), batch_size=BATCH))
    return seen.trained


@pytest.mark.slow
def test_callbacks_of_every_rank_see_the_numbers_beside_the_loss() -> None:
    first, *others = run_ranks(train_with_extras, 4, "tp2_pp2")
    assert len(first) == 4 and all(set(step) == {"loss", "largest"} for step in first)
    batch = cut(rows().batch, 0, BATCH)
    with torch.no_grad():
        largest = initial_model(RECIPE)(input_ids=batch["input_ids"]).logits.amax((1, 2)).tolist()
    counts = [target_count("llama", cut(batch, row, 1)) for row in range(BATCH)]
    expected = sum(value * count for value, count in zip(largest, counts, strict=True)) / sum(
        counts
    )
    assert first[0]["largest"] == pytest.approx(expected, rel=1e-5), (
        "one row a micro-batch, weighted as its loss"
    )
    for other in others:
        assert all(step == pytest.approx(seen) for step, seen in zip(other, first, strict=True))


class Prints(Steps):
    """Prints before the call of the model or after it, as people do."""

    def __init__(self, recipe: Recipe, early: bool) -> None:
        super().__init__(recipe)
        self.early = early

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        if self.early:
            self.print("early")
        loss = super().training_step(batch, batch_idx)["loss"]
        if not self.early:
            self.print("late")
            assert self.logger is None and self.loggers == []
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.print("end of a batch")


def print_in_steps(layout: str, early: bool, **strategy: Any) -> tuple[list[str], list[str]]:
    """Warnings, and printed lines."""
    out = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
        warnings.simplefilter("always")
        strategy_trainer(layout, **strategy).fit(
            Prints(RECIPE, early), DataLoader(rows(), batch_size=BATCH)
        )
    return [
        str(one.message) for one in caught if str(one.message).startswith("self.")
    ], out.getvalue().split()


@pytest.mark.parametrize(
    "early", by_default([True, False], 0), ids=["before the model", "after the model"]
)
def test_prints_in_a_step_of_a_pipeline_are_warned_of_once(early: bool) -> None:
    """Each case is warned of by the one rank that knows it: rank 0, or the last stage."""
    (first, printed), (last, nothing) = run_ranks(print_in_steps, 2, "pp2", early)
    assert (nothing, printed.count("end")) == ([], 4)
    if early:
        assert (
            last == []
            and len(first) == 1
            and first[0].startswith("self.print is used before the step calls the model.")
        )
        assert printed.count("early") >= ROWS, "once for each micro-batch of one row"
    else:
        assert first == [] and "late" not in printed
        assert [one.partition(" ")[0] for one in last] == ["self.print", "self.logger"]
        assert all(
            "does nothing" in one and "Use self.log" in one and "on_train_batch_end" in one
            for one in last
        )


@pytest.mark.full
def test_prints_in_a_step_are_not_warned_of_where_rank_0_has_the_loss() -> None:
    """Without a pipeline, and in a schedule whose last stage is on rank 0."""
    for layout, ranks, options in (("tp2", 2, {}), ("pp2", 2, {"schedule": "zbvzerobubble"})):
        (said, printed), (others, _) = run_ranks(print_in_steps, ranks, layout, False, **options)
        assert said == others == [] and printed.count("late") >= ROWS


class Numbers(Module):
    """Returns what is no tensor, too; keeps lists in a metric of which earlier stages have none."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.ranking = RetrievalMRR()

    def validation_step(self, batch: models.Batch, batch_idx: int) -> dict[str, Any]:
        assert self.model is not None
        out = self.model(**batch)
        first = batch["input_ids"][:, 0]
        scores = out.logits[:, 0].float().softmax(-1)
        for row, token in enumerate(first.tolist()):
            target = torch.zeros(scores.shape[1], dtype=torch.bool)
            target[token] = True
            self.ranking.update(
                scores[row], target, indexes=batch["row"][row].expand(scores.shape[1])
            )
        return {"mean": float(out.loss), "rows": len(first), "kind": "text"}

    def on_validation_epoch_end(self) -> None:
        self.log("mrr", self.ranking.compute())


class KeepsOutputs(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any
    ) -> None:
        self.seen.append(outputs)


def numbered_rows() -> Rows:
    return Rows(cut(data(RECIPE), 0, 12) | {"row": torch.arange(12)})


class WithoutRow(Numbers):
    def configure_model(self) -> None:
        super().configure_model()
        inner = self.model
        assert inner is not None
        forward = inner.forward
        inner.forward = lambda row=None, **batch: forward(**batch)  # type: ignore[method-assign]


def validate_numbers(layout: str) -> tuple[float, list[Any]]:
    outputs = KeepsOutputs()
    trainer = strategy_trainer(layout, [outputs])
    found = trainer.validate(
        WithoutRow(RECIPE), DataLoader(numbered_rows(), batch_size=4), verbose=False
    )
    return found[0]["mrr"], outputs.seen


def ranking_and_losses() -> tuple[float, list[float]]:
    """(mean reciprocal rank of each row's first token, mean loss of each batch) on one process,
    without torchmetrics."""
    batch = numbered_rows().batch
    ids = batch["input_ids"]
    with torch.no_grad():
        scores = initial_model(RECIPE)(input_ids=ids).logits[:, 0]
    ranks = 1 + (scores > scores.gather(1, ids[:, :1])).sum(1)
    tokens = {key: value for key, value in batch.items() if key != "row"}
    return (1 / ranks).mean().item(), [
        loss_of(cut(tokens, start, 4))[0] for start in range(0, 12, 4)
    ]


@pytest.mark.slow
def test_lists_in_metrics_and_plain_numbers_in_outputs() -> None:
    expected, means = ranking_and_losses()
    for layout in ("pp2", "pp2_dp2"):
        for mrr, outputs in run_ranks(validate_numbers, 2 * (1 + ("dp2" in layout)), layout):
            assert mrr == pytest.approx(expected, rel=1e-5)
            assert all(seen["kind"] == "text" for seen in outputs if "kind" in seen)
            assert [seen["rows"] for seen in outputs] == ([4, 2] if "dp2" in layout else [4, 4, 4])
            if layout == "pp2":
                assert [seen["mean"] for seen in outputs] == pytest.approx(means, rel=1e-5)


class ComputesInside(Module):
    def __init__(self, recipe: Recipe, on_step: bool) -> None:
        super().__init__(recipe)
        self.mean = MeanMetric(dist_sync_on_step=on_step)
        self.on_step = on_step

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss = self.model(**batch).loss
        self.mean(loss.detach())
        if not self.on_step:
            self.mean.compute()
        return loss


def fit(
    layout: str, kind: str, zero_stage: int = 0, micro_batch_size: int = 1, **arguments: Any
) -> int:
    """Steps taken."""
    kinds: dict[str, type[Module]] = {
        "inside": ComputesInside,
        "frozen": PartlyFrozen,
        "communicates": Communicates,
    }
    kinds |= {
        "fewer": CallsLessOften,
        "backward": OwnBackward,
        "tempered": Tempered,
        "two": TwoOptimizers,
        "manual": Manual,
    }
    module = kinds.get(kind, Steps)(RECIPE, **arguments)
    callbacks: list[pl.Callback] = (
        [GradientAccumulationScheduler({0: 1, 1: 2})] if kind == "accumulates" else []
    )
    trainer = strategy_trainer(
        layout, callbacks, zero_stage=zero_stage, micro_batch_size=micro_batch_size, max_epochs=2
    )
    trainer.fit(module, DataLoader(rows(), batch_size=BATCH))
    return trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_step", "layout"),
    by_default([(False, "pp2"), (True, "pp2"), (False, "dp2"), (True, "dp2")], 0),
)
def test_a_metric_over_all_ranks_inside_a_step_is_refused(on_step: bool, layout: str) -> None:
    """Some ranks never get there: it would wait for ever."""
    with pytest.raises(ConfigError, match="metric.compute"):
        run_ranks(fit, 2, layout, "inside", on_step=on_step)


class Communicates(Module):
    def __init__(self, recipe: Recipe, how: str) -> None:
        super().__init__(recipe)
        self.how = how

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss = self.model(**batch).loss
        if self.how == "all_gather":
            self.all_gather(loss)
        else:
            self.trainer.strategy.barrier()
        return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "how"), by_default([("pp2", "all_gather"), ("dp2", "barrier")], 0)
)
def test_communication_of_the_users_own_inside_a_step_is_refused(layout: str, how: str) -> None:
    with pytest.raises(ConfigError, match="communicates with all ranks"):
        run_ranks(fit, 2, layout, "communicates", how=how)


class CallsLessOften(Module):
    """The second call depends on the first one's output."""

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss = self.model(**batch).loss
        return loss if isinstance(loss, Tensor) else loss + self.model(**batch).loss


@pytest.mark.slow
def test_fewer_calls_on_the_last_stage_are_refused() -> None:
    with pytest.raises(
        PlanError,
        match=(
            "On the last pipeline stage, the step calls the model 1 time, but on the first stage 2"
            " times"
        ),
    ):
        run_ranks(fit, 2, "pp2", "fewer")


@pytest.mark.slow
def test_whole_batches_may_communicate() -> None:
    """One micro-batch, no pipeline: the step runs equally often everywhere."""
    assert run_ranks(fit, 2, "dp2", "communicates", micro_batch_size=BATCH, how="all_gather") == [
        4,
        4,
    ]


class OwnBackward(Module):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Manual(Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("backward", "overrides backward"),
        ("two", "several optimizers"),
        ("manual", "automatic_optimization=False.*Return the loss"),
    ],
)
def test_what_would_be_ignored_is_refused(kind: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_ranks(fit, 2, "dp2", kind)


def test_accumulation_may_begin_at_a_later_epoch() -> None:
    assert run_ranks(fit, 2, "dp2", "accumulates") == [3, 3]


class TwoOptimizers(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=1e-3) for _ in range(2)]


def train_with_wrong_plan(precision: str) -> None:
    """The norms of queries and keys are used on each rank's own heads, which the plan does not
    say."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe("qwen3", steps=2)
    wrong = dict(initial_model(recipe).config.base_model_tp_plan)  # type: ignore[union-attr, arg-type]
    plan = {f"model.{name}": style for name, style in wrong.items() if "_norm" not in name}
    # With sequence parallelism all gradients in there are sums over the ranks, so that nothing has
    # to be said.
    cuts = plan | {"lm_head": "colwise_gather_output"}
    strategy = Lightning3DStrategy(
        "tp2", plan={"tp": cuts}, sequence_parallel=False, self_check="never"
    )
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, precision=precision)
    trainer.fit(Module(recipe), DataLoader(Rows(cut(data(recipe), 0, 8)), batch_size=4))


@pytest.mark.parametrize("precision", by_default(["32-true", "bf16-true"], 1))
def test_a_plan_that_lets_copies_drift_is_refused_in_every_precision(precision: str) -> None:
    with pytest.raises(PlanError, match="replicated_with_grad_allreduce"):
        run_ranks(train_with_wrong_plan, 2, precision)


class PartlyFrozen(Module):
    """Trains the last block and the head only."""

    def __init__(self, recipe: Recipe, filtered: bool) -> None:
        super().__init__(recipe)
        self.filtered = filtered

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("layers.3." in name or "lm_head" in name)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        chosen = [p for p in self.parameters() if p.requires_grad or not self.filtered]
        return torch.optim.AdamW(chosen, lr=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("filtered", by_default([False, True], 1))
@pytest.mark.parametrize("zero", by_default([0, 1, 3], 1))
def test_a_frozen_stage(zero: int, filtered: bool) -> None:
    assert run_ranks(fit, 2, "pp2", "frozen", zero, filtered=filtered) == [8, 8]


class Tempered(Module):
    """A parameter beside the model, named in the optimizer."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.temperature = torch.nn.Parameter(torch.ones(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [{"params": [self.temperature]}, {"params": list(self.parameters())[1:]}]
        )


@pytest.mark.slow
def test_a_parameter_that_is_on_another_stage_is_told() -> None:
    with pytest.raises(ConfigError, match="does not exist on pipeline rank 0"):
        run_ranks(fit, 2, "pp2", "tempered")


def second_trainer(layout: str, second: str) -> tuple[list[float], str]:
    """Loss after a fit: validated by its own Trainer, by another one, and after a second fit by the
    other."""
    module, loader = Steps(RECIPE), DataLoader(rows(), batch_size=BATCH)
    first = strategy_trainer(layout)
    first.fit(module, loader)
    losses = [first.validate(module, loader, verbose=False)[0]["val_loss"]]
    try:
        other = strategy_trainer(second)
        losses.append(other.validate(module, loader, verbose=False)[0]["val_loss"])
        third = strategy_trainer(second, zero_stage=1)
        third.fit(module, loader)
        losses.append(third.validate(module, loader, verbose=False)[0]["val_loss"])
    except Exception as error:
        return losses, f"{type(error).__name__}: {error}"
    return losses, ""


@pytest.mark.full
def test_a_second_trainer_goes_on_with_the_module() -> None:
    first, *others = run_ranks(second_trainer, 4, "tp2_pp2", "tp2_pp2")
    assert all(other == first for other in others)
    losses, message = first
    assert message == "" and losses[0] == losses[1] > losses[2]


@pytest.mark.slow
def test_a_second_trainer_with_another_layout_is_refused() -> None:
    for losses, message in run_ranks(second_trainer, 4, "tp2_pp2", "pp2_dp2"):
        assert len(losses) == 1
        assert message.startswith("ConfigError") and "tp2_pp2" in message and "pp2_dp2" in message


def warned(layout: str, micro_batch_size: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = strategy_trainer(layout, micro_batch_size=micro_batch_size)
        trainer.fit(Steps(RECIPE), DataLoader(rows(), batch_size=BATCH, drop_last=True))
    return [str(warning.message) for warning in caught if "pipeline stages" in str(warning.message)]


@pytest.mark.slow
def test_a_pipeline_that_idles_for_want_of_micro_batches_is_told_once() -> None:
    told, silent = run_ranks(warned, 2, "pp2", 4)
    assert len(told) == 1 and "1 micro-batch for 2 pipeline stages" in told[0] and silent == []
    assert run_ranks(warned, 2, "pp2", 1) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "zero"),
    by_default([(layout, zero) for layout in ("tp2_dp4", "tp4_pp1_dp2") for zero in (0, 1, 3)], 4),
)
def test_copies_stay_equal_where_the_vocabulary_is_cut_unevenly(layout: str, zero: int) -> None:
    """67 tokens: tensor-parallel ranks have flat buffers of different sizes, but hold the same
    norms bit by bit."""
    parity.assert_same_training("llama", layout, zero=zero)


def another_module() -> list[float]:
    """A strategy that has trained one module validates another, in memory and without
    `configure_model`."""
    trainer, loader = strategy_trainer("pp2"), DataLoader(rows(), batch_size=BATCH)
    trainer.fit(Steps(RECIPE), loader)
    other = Steps(RECIPE, initial_model(RECIPE))
    return [trainer.validate(other, loader, verbose=False)[0]["val_loss"] for _ in range(2)]


@pytest.mark.slow
def test_another_module_with_the_same_trainer() -> None:
    expected, _ = loss_of(rows().batch)
    for losses in run_ranks(another_module, 2):
        assert losses == pytest.approx([expected, expected], rel=1e-5)


class Several(Steps):
    def validation_step(self, batch: list[models.Batch], batch_idx: int) -> None:  # type: ignore[override]
        assert self.model is not None
        self.log("val_loss", self.model(**batch[0]).loss)


def validate_several() -> float:
    loaders = CombinedLoader([DataLoader(rows(), batch_size=BATCH) for _ in range(2)], "max_size")
    return strategy_trainer("pp2").validate(Several(RECIPE), loaders, verbose=False)[0]["val_loss"]


def test_batches_of_several_loaders() -> None:
    expected, _ = loss_of(rows().batch)
    assert run_ranks(validate_several, 2) == pytest.approx([expected] * 2, rel=1e-5)


class Fails(pl.Callback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == 1 and batch_idx == 1:
            raise ArithmeticError("cannot go on")


def fit_and_fail(folder: str) -> None:
    from lightning_3d.strategy import Lightning3DStrategy

    callbacks = [Fails(), OnExceptionCheckpoint(folder)]
    strategy = Lightning3DStrategy("pp2", micro_batch_size=1)
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=1, callbacks=callbacks, enable_checkpointing=True
    )
    trainer.fit(Steps(RECIPE), DataLoader(rows(), batch_size=BATCH))


@pytest.mark.slow
def test_a_checkpoint_on_exception_does_not_wait_for_ranks_that_know_nothing(tmp_path: Any) -> None:
    with pytest.raises(ArithmeticError):
        run_ranks(fit_and_fail, 2, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} <= {".lightning_3d.lock"}, (
        "no checkpoint, nor a part of one"
    )


class LayerwiseRates(Steps):
    """Each block has a group and a learning rate of its own, so that stages have different ones."""

    def configure_optimizers(self) -> Any:
        groups = []
        for name, parameter in self.named_parameters():
            layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else 0
            groups.append({"params": [parameter], "lr": 1e-4 * (layer + 1)})
        optimizer = torch.optim.AdamW(groups)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


def resumed_rates(folder: str, second: str) -> tuple[list[float], list[float], str]:
    loader = DataLoader(rows(), batch_size=BATCH)
    first, again = strategy_trainer("pp2"), strategy_trainer(second, max_epochs=2)
    first.fit(LayerwiseRates(RECIPE), loader)
    first.save_checkpoint(f"{folder}/one")
    before = [group["lr"] for group in first.optimizers[0].param_groups]
    try:
        again.fit(LayerwiseRates(RECIPE), loader, ckpt_path=f"{folder}/one")
    except Exception as error:
        return before, [], str(error)
    return before, [group["lr"] for group in again.optimizers[0].param_groups], ""


@pytest.mark.slow
def test_learning_rates_of_later_stages_survive_a_resume(tmp_path: Any) -> None:
    first, last = run_ranks(resumed_rates, 2, str(tmp_path), "pp2")
    for before, after, message in (first, last):
        assert message == "" and after == pytest.approx([rate / 2 for rate in before])
    assert set(first[0]) != set(last[0])
    # each parameter finds its group
    for before, after, message in run_ranks(resumed_rates, 2, str(tmp_path), "dp2"):
        assert (
            message == ""
            and set(before) <= {2 * rate for rate in after}
            and len(after) > len(before)
        )


def unequal(training: bool) -> str:
    """Rank 1 has a batch more: a sampler of the user's own."""
    from lightning_3d.strategy import Lightning3DStrategy

    strategy = Lightning3DStrategy("dp2", micro_batch_size=1)
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=1, use_distributed_sampler=False
    )
    chosen = Subset(rows(), range(BATCH * (1 + trainer.global_rank)))
    loader = DataLoader(chosen, batch_size=BATCH)
    try:
        (
            trainer.fit(Steps(RECIPE), loader)
            if training
            else trainer.validate(Steps(RECIPE), loader, verbose=False)
        )
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("training", [True, False])
def test_data_ranks_with_different_numbers_of_batches_are_refused(training: bool) -> None:
    """One would wait for the other for ever."""
    for message in run_ranks(unequal, 2, training):
        assert "different numbers of batches: 1 to 2" in message
