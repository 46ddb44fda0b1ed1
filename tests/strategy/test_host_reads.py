"""A training step launches all of its work, the optimizer's too, before the host reads a number
that the device computes."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import torch
from counting import HostWaits
from lightning.pytorch.callbacks import Callback
from masked_batches import known_on_cpu, with_mask
from ranks import run_ranks
from reference import Recipe, data
from sweeps import by_default

from lightning_3d.engine.step import checks
from lightning_3d.engine.step.checks import SameBatch
from lightning_3d.layout import Layout
from lightning_3d.strategy import Lightning3DStrategy

STEPS = 5
CHECKED = 3
"""Steps at the start of a fit that check what later steps do not: that ranks read the same batch,
and have as many."""

ON_HOST = (
    "_require_held",  # of CPU tensors only; on a device an assertion takes its place
    "most_micro_batches",  # the rest is counted by hosts and sent over gloo
    "agree_about_logs",
    "_require_same_order",
    "_finish_micro_batches",
    "read_host_copy",  # of `KnownValues`
    *("_padding", "cover"),  # of masks with context parallelism: of a copy in host memory
    "_get_value",  # of torch: an optimizer that is not fused counts its steps in host memory
)
"""Functions whose reads do not wait for a device."""

CELLS: list[tuple[str, dict[str, Any]]] = [
    ("dp2", {"zero_stage": 1, "dtype": "bfloat16"}),
    ("tp2_pp2", {"mask": "right"}),
    ("dp2", {}),
    ("cp2", {}),
    ("cp2", {"mask": "right"}),
    ("dp2", {"zero_stage": 2, "zero_reduce": "micro_batch", "zero_overlap_gather": True}),
    ("dp2", {"zero_stage": 3, "dtype": "bfloat16"}),
    ("dp2", {"zero_stage": 3, "zero_gather": "micro_batch"}),
    ("pp2_dp2", {"schedule": "ZBVZeroBubble", "zero_stage": 1}),
    ("tp2_pp2_dp2", {"zero_stage": 2}),
    ("dp2", {"nonfinite": "skip", "zero_stage": 1}),
    ("dp2", {"nonfinite": "ignore", "fused": False}),  # nothing is skipped
]


class Logs(parity.Module):
    """It logs, and returns more than a loss."""

    fused = True

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, torch.Tensor)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.recipe.learning_rate, fused=self.fused)


class Ends(parity.StepValues):
    """Keeps what a callback sees at the end of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:  # type: ignore[override]
        super().on_train_batch_end(trainer, module, outputs, *args)
        self.seen.append(
            (
                float(outputs["loss"]),
                float(outputs["twice"]),
                float(trainer.callback_metrics["loss_step"]),
            )
        )


def fit(
    layout: str, model: str = "llama", dtype: str = "float32", *, known: bool = True, **options: Any
) -> Any:
    """(reads of each step before its optimizer is launched, what callbacks see, (losses, norms)) on
    this rank.

    Args:
        known: whether the host answers questions about masks as on a GPU.
    """
    with known_on_cpu() if known else nullcontext():
        return _fit(layout, model, dtype, **options)


def _fit(
    layout: str,
    model: str,
    dtype: str,
    *,
    mask: str = "none",
    fused: bool = True,
    accumulate: int = 1,
    **options: Any,
) -> Any:
    recipe = Recipe(model, 4, steps=STEPS, global_batch=4)
    rows = parity.Rows(with_mask(data(recipe), mask))
    plan = Lightning3DStrategy(layout, micro_batch_size=1, seed=0, self_check="never", **options)
    assert plan.layout is not None
    ends, module = Ends(), Logs(recipe)
    module.fused = fused
    trainer = parity.quiet_trainer(
        strategy=plan,
        devices=plan.layout.world_size,
        max_steps=STEPS,
        precision=parity.PRECISIONS[dtype],
        gradient_clip_val=0.3,
        callbacks=[ends],
        accumulate_grad_batches=accumulate,
    )
    reads: list[list[str]] = []
    step, advance = plan.training_step, plan.optimizer_step

    def counted_step(*args: Any, **kwargs: Any) -> Any:
        reads.append([])
        waits = HostWaits(ON_HOST)
        with waits:
            outputs = step(*args, **kwargs)
        reads[-1] += waits.names
        return outputs

    def counted_optimizer(*args: Any, **kwargs: Any) -> Any:
        launch = plan.built.step_optimizer

        def launched() -> None:
            waits = HostWaits(ON_HOST)
            with waits:
                launch()
            reads[-1] += waits.names

        plan.built.step_optimizer = launched  # type: ignore[method-assign]
        try:
            return advance(*args, **kwargs)
        finally:
            plan.built.step_optimizer = launch  # type: ignore[method-assign]

    plan.training_step, plan.optimizer_step = counted_step, counted_optimizer  # type: ignore[method-assign]
    trainer.fit(module, datamodule=parity.Data(rows, 4 // plan.layout.dp // accumulate))
    return reads, ends.seen, (ends.losses, ends.grad_norms)


def ranks_of(layout: str) -> int:
    return Layout.parse(layout).world_size


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "options"), by_default(CELLS, 0, 1), ids=str)
def test_nothing_is_read_before_the_optimizer_is_launched(
    layout: str, options: dict[str, Any]
) -> None:
    """Logs, numbers and outputs of the step are those of a step that reads first, on every rank."""
    launched = run_ranks(fit, ranks_of(layout), layout, **options)
    first = run_ranks(
        fit, ranks_of(layout), layout, **options | {"reliability": {"loss_spikes": "skip"}}
    )
    for (reads, seen, numbers), (reads_first, seen_first, numbers_first) in zip(
        launched, first, strict=True
    ):
        assert reads[CHECKED:] == [[]] * (STEPS - CHECKED)
        assert all(reads_first)
        assert numbers == numbers_first and seen == seen_first
        assert all(logged == pytest.approx(loss, rel=1e-2) for loss, _, logged in seen)


READS = {"llama": (1, 1, 2), "gemma3": (2, 1, 2), "mistral": (1, 0, 0), "gpt2_tiny": (1, 1, 2)}
"""Reads that Transformers' masks cost for a micro-batch without a mask, with a mask of ones, and
with padding."""
ASKED = [
    (model, mask, reads)
    for model, counts in READS.items()
    for mask, reads in zip(("none", "ones", "right"), counts, strict=True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mask", "reads"), by_default(ASKED, 3, 11), ids=str)
def test_no_mask_is_read(model: str, mask: str, reads: int) -> None:
    """And the model computes the same as where Transformers reads it."""
    [(answered, seen, numbers)] = run_ranks(fit, 1, "dp1", model, mask=mask)
    [(read, seen_read, numbers_read)] = run_ranks(fit, 1, "dp1", model, mask=mask, known=False)
    assert answered[CHECKED:] == [[]] * (STEPS - CHECKED)
    assert [len(names) for names in read[CHECKED:]] == [4 * reads] * (STEPS - CHECKED)
    assert numbers == numbers_read and seen == seen_read


@pytest.mark.full
def test_no_mask_is_read_outside_compiled_and_recomputed_blocks() -> None:
    how: dict[str, Any] = {"mask": "left", "compile": True, "recompute": "full"}
    [(answered, seen, numbers)] = run_ranks(fit, 1, "dp1", "gemma3", **how)
    [(_, seen_read, numbers_read)] = run_ranks(fit, 1, "dp1", "gemma3", known=False, **how)
    assert answered[CHECKED:] == [[]] * (STEPS - CHECKED)
    assert numbers == numbers_read and seen == seen_read


@pytest.mark.slow
def test_a_mixture_reads_once_for_each_layer() -> None:
    """For the number of tokens that come, in each of the two micro-batches of a rank."""
    for reads, *_ in run_ranks(fit, 2, "ep2_dp2", "mixtral"):
        assert all(0 < len(names) <= 4 * 2 for names in reads[CHECKED:])


def test_an_optimizer_that_the_device_cannot_skip_waits() -> None:
    """For the numbers that decide whether it may step: loss and norm."""
    for reads, *_ in run_ranks(fit, 2, "dp2", fused=False):
        assert all(len(names) == 3 for names in reads[CHECKED:]), reads


class Overflows(Logs):
    """The loss of one batch, its second unless another is given, is infinite, but no gradient
    is."""

    bad = 1

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        outputs = super().training_step(batch, batch_idx)
        outputs["loss"] = outputs["loss"] + (torch.inf if batch_idx == self.bad else 0.0)
        return outputs


def weights_by_step(
    accumulate: int = 1, **options: Any
) -> tuple[list[torch.Tensor], list[bool], list[str]]:
    """(a weight, skipped, warnings) at the end of each step, on one rank. The first batch of the
    second step overflows."""
    recipe = Recipe("llama", 1, steps=STEPS, global_batch=2)
    plan = Lightning3DStrategy("dp1", nonfinite="skip", **options)
    kept: list[torch.Tensor] = []
    skipped: list[bool] = []

    class Keeps(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.strategy.last_step.grad_norm is not None:
                kept.append(next(module.parameters()).detach().clone())
                skipped.append(trainer.strategy.last_step.skipped)

    trainer = parity.quiet_trainer(
        strategy=plan,
        devices=1,
        max_steps=STEPS,
        callbacks=[Keeps()],
        accumulate_grad_batches=accumulate,
    )
    module = Overflows(recipe)
    module.bad = accumulate
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=parity.Data(parity.Rows(data(recipe)), 2 // accumulate))
    return kept, skipped, [str(one.message) for one in warned]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_device_looks_at_loss_and_norm(accumulate: int) -> None:
    """At the losses of all batches of the step."""
    [(kept, skipped, warned)] = run_ranks(weights_by_step, 1, accumulate)
    assert skipped == [False, True, False, False, False]
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])
    [said] = [text for text in warned if "The optimizer skips this step" in text]
    assert (
        said.startswith("Step 2: the loss is inf and the gradient norm is ")
        and "norm is nan" not in said
    )


class Hooked(Overflows):
    """A hook before the optimizer, as for clipping by a running mean, which would keep what is not
    finite."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.seen: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.trainer.strategy.last_step is not None  # type: ignore[attr-defined]
        self.seen.append(
            float(self.trainer.callback_metrics["loss_step"]) - self.trainer.strategy.last_step.loss
        )  # type: ignore[attr-defined]


def seen_by_hook() -> list[float]:
    """What the hook has seen: the logged loss less that of the step."""
    recipe = Recipe("llama", 1, steps=STEPS, global_batch=2)
    module, plan = Hooked(recipe), Lightning3DStrategy("dp1", nonfinite="skip")
    trainer = parity.quiet_trainer(strategy=plan, devices=1, max_steps=STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=parity.Data(parity.Rows(data(recipe)), 2))
    return module.seen


def test_hooks_before_the_optimizer_run_in_steps_that_are_taken() -> None:
    """With the numbers of their own step: such a step is not launched before it is read."""
    [seen] = run_ranks(seen_by_hook, 1)
    assert seen == pytest.approx([0.0] * (STEPS - 1), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "accumulate"),
    by_default([("dp1", 4), ("dp2", 2), ("tp2_pp2", 2), ("tp2_pp2", 4)], 0, 1),
)
def test_batches_that_accumulate_are_not_read(layout: str, accumulate: int) -> None:
    """Until the last one of their step is launched, whether the device decides about the step or
    not."""
    once = run_ranks(fit, ranks_of(layout), layout)
    for fused in (True, False):
        several = run_ranks(fit, ranks_of(layout), layout, accumulate=accumulate, fused=fused)
        for (reads, seen, numbers), (_, seen_once, numbers_once) in zip(several, once, strict=True):
            # all losses, the norm, and what the last batch logs
            at_last = 0 if fused else accumulate + 2
            assert [len(names) for names in reads[accumulate * CHECKED :]] == (
                [0] * (accumulate - 1) + [at_last]
            ) * (STEPS - CHECKED)
            assert numbers[0] == pytest.approx(numbers_once[0], rel=1e-5) and numbers[
                1
            ] == pytest.approx(numbers_once[1], rel=1e-4)
            assert len(seen) == accumulate * len(seen_once)
            assert all(
                logged == pytest.approx(accumulate * loss, rel=1e-2) for loss, _, logged in seen
            )


@pytest.mark.parametrize(
    ("accumulate", "compared"), [(1, [1, 2, 3, 64, 128]), (4, [1, 5, 65, 129]), (64, [1, 65, 129])]
)
def test_batches_are_compared_before_the_first_kernel_of_a_step(
    accumulate: int, compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For which the host waits for the device."""
    found: list[int] = []
    mesh: Any = SimpleNamespace(
        size=lambda axis: 2 if axis == "tp" else 1, group=lambda *axes: None
    )
    same = SameBatch(mesh, torch.device("cpu"))
    for number in range(1, 131):
        monkeypatch.setattr(
            checks.dist, "all_reduce", lambda *args, at=number, **kwargs: found.append(at)
        )
        same.check({"input_ids": torch.ones(2, 2)}, begins=(number - 1) % accumulate == 0)
    assert found == compared
