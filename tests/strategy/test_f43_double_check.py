"""A step that runs twice shows a fault in the arithmetic of one rank: which rank, where, and
whether it is there again."""

import re
from typing import Any

import pytest
import torch
from parity import PRECISIONS, Data, Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from sweeps import by_default
from torch import Tensor

from lightning_3d.errors import ArithmeticFault, ConfigError
from lightning_3d.layout import Layout

STEPS, BATCH, EVERY = 4, 4, 2


class FaultyProduct:
    """Takes the place of `torch.nn.functional.linear`: flips a bit of chosen products of one step.

    Args:
        persistent: the product is wrong in another way each time; otherwise only in one run.
        which: the product of a run that is wrong, counted from the start of the step.
        in_run: the run that it is wrong in, from 1.
    """

    def __init__(self, product: Any, *, persistent: bool, which: int, in_run: int) -> None:
        self.product, self.persistent, self.which, self.in_run = product, persistent, which, in_run
        self.calls = self.faults = 0
        self.on = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        result = self.product(*args, **kwargs)
        if not self.on:
            return result
        self.calls += 1
        if self.calls == self.which:
            self.faults += 1
            if self.persistent or self.faults == self.in_run:
                result = result.clone()
                with torch.no_grad():
                    result.view(-1)[self.faults] += 0.5
        return result


def train(
    layout: str,
    faulty: int | None = None,
    *,
    persistent: bool = False,
    which: int = 3,
    in_run: int = 1,
    accumulate: int = 1,
    model: str = "llama",
    dtype: str = "float32",
    steps: int = STEPS,
    every: int | None = EVERY,
    **options: Any,
) -> tuple[str, list[str], int, dict[str, Tensor]]:
    """Fit on this rank. Returns the text of the error, the warnings, the steps taken and this
    rank's optimizer state."""
    from lightning_3d.engine.step.again import RepeatableStep
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(model, 4, steps=steps, global_batch=BATCH)
    strategy = Lightning3DStrategy(
        layout,
        **{"micro_batch_size": 1, **options},
        reliability={"rerun_every_n_steps": every, "check_replicas_every_n_steps": 1},
    )
    assert strategy.layout is not None
    trainer = quiet_trainer(
        strategy=strategy,
        devices=strategy.layout.world_size,
        precision=PRECISIONS[dtype],
        max_epochs=1,
        gradient_clip_val=0.3,
        accumulate_grad_batches=accumulate,
    )
    product = torch.nn.functional.linear
    wrong = FaultyProduct(product, persistent=persistent, which=which, in_run=in_run)
    remember, again = RepeatableStep.remember, RepeatableStep.again

    def begins(
        self: Any, micro_batches: Any, rest: Any, step: int, place: int, **kwargs: Any
    ) -> None:
        wrong.on = faulty == strategy.global_rank and step == 1
        wrong.calls = wrong.calls if place else 0
        remember(self, micro_batches, rest, step, place, **kwargs)

    def begins_again(self: Any) -> Any:
        wrong.calls = 0
        return again(self)

    error = ""
    with pytest.MonkeyPatch.context() as patch, pytest.warns() as warned:
        if faulty is not None:  # a compiler cannot follow it
            patch.setattr(torch.nn.functional, "linear", wrong)
        patch.setattr(RepeatableStep, "remember", begins)
        patch.setattr(RepeatableStep, "again", begins_again)
        try:
            trainer.fit(
                Module(recipe),
                datamodule=Data(Rows(data(recipe)), BATCH // strategy.layout.dp // accumulate),
            )
        except ArithmeticFault as found:
            error = str(found)
    state = {
        f"{s.name} {k}": torch.as_tensor(v).clone()
        for s in strategy.built.backend.optimizer_shards()
        for k, v in s.values.items()
    }
    said = [str(one.message) for one in warned if "computed twice" in str(one.message)]
    return error, said, trainer.global_step, state


CELLS: list[tuple[str, int, dict[str, Any]]] = [
    ("tp2", 1, {"which": 7}),
    ("pp2_dp2", 3, {}),
    ("dp2", 0, {"zero_stage": 3, "zero_gather": "micro_batch", "dtype": "bfloat16"}),
    ("dp2", 1, {"zero_stage": 2, "zero_reduce": "micro_batch"}),
    ("dp2", 1, {"zero_stage": 1}),
    ("pp2", 1, {"schedule": "ZBVZeroBubble", "recompute": "full"}),
    ("cp2", 0, {}),
    ("tp2", 0, {"which": 7, "sequence_parallel": False}),
    ("dp2", 1, {"in_run": 2}),
    ("dp2", 0, {"accumulate": 2}),
    ("dp2_ep2", 1, {"model": "mixtral"}),
    ("tp2_pp2", 2, {"which": 7}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "rank", "options"), by_default(CELLS, 0, 1, 2), ids=str)
def test_f43_a_transient_fault_is_found_and_left_out(
    layout: str, rank: int, options: dict[str, Any]
) -> None:
    world = Layout.parse(layout).world_size
    parts = run_ranks(train, world, layout, rank, **options)
    plain = run_ranks(train, world, layout, every=None, **options)
    [said] = parts[0][1]
    begin = (
        rf"^Step 2 was computed twice, and the results differ on rank {rank} \([^()]*, cpu\), first"
        r" in [^()]*\. A third run agrees with"
    )
    assert re.search(begin, said), said
    assert "the fault was transient" in said
    for part, other in zip(parts, plain, strict=True):
        assert (part[0], part[2]) == ("", STEPS)
        assert part[3].keys() == other[3].keys() and not [
            k for k, v in part[3].items() if not torch.equal(v, other[3][k])
        ]


@pytest.mark.parametrize(("layout", "rank", "options"), by_default(CELLS, 1, 4), ids=str)
def test_f44_a_persistent_fault_ends_the_run_and_names_the_rank(
    layout: str, rank: int, options: dict[str, Any]
) -> None:
    parts = run_ranks(
        train, Layout.parse(layout).world_size, layout, rank, persistent=True, **options
    )
    assert len({part[0] for part in parts}) == 1
    error, said, steps, _ = parts[0]
    begin = (
        rf"^Step 2 was computed twice, and the results differ on rank {rank} \([^()]*, cpu\), first"
        r" in [^()]*\. A third run differs too"
    )
    assert re.search(begin, error), error
    assert not said and steps == 1


CLEAN: list[tuple[str, dict[str, Any]]] = [
    ("tp2_pp2", {}),
    ("dp2", {"compile": True}),
    *(
        (layout, {key: value for key, value in options.items() if key not in ("which", "in_run")})
        for layout, _, options in CELLS
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "options"), by_default(CLEAN, 0), ids=str)
def test_f43_healthy_steps_have_the_same_bits_twice(layout: str, options: dict[str, Any]) -> None:
    parts = run_ranks(train, Layout.parse(layout).world_size, layout, every=1, **options)
    assert all(part[:3] == ("", [], STEPS) for part in parts)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("layout", "options"), CLEAN, ids=str)
def test_f43_no_false_alarm_in_a_thousand_steps(layout: str, options: dict[str, Any]) -> None:
    parts = run_ranks(
        train, Layout.parse(layout).world_size, layout, every=2, steps=1000, timeout=1200, **options
    )
    assert all(part[:3] == ("", [], 1000) for part in parts)


def test_gpus_without_deterministic_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_3d.engine.double_check import DoubleCheck

    parts: Any = None
    check = DoubleCheck(parts, parts, parts, torch.device("cuda"), layers=True)
    check.begin_fit(None)
    with pytest.raises(
        ConfigError, match=r"deterministic kernels.*\+trainer.extra.deterministic=true"
    ):
        check.begin_fit(5)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check.begin_fit(5)
    assert check.is_due(4) is False  # the first step of a fit
