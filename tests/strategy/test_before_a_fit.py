"""A strategy before a Trainer has built its model, and the ways in which a fit ends."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from lightning_3d.checkpoint.outcome import NotSaved
from lightning_3d.engine.skipped_blocks import refuse_skipped_blocks
from lightning_3d.errors import ConfigError, NonFiniteError
from lightning_3d.layout import Layout
from lightning_3d.strategy import Lightning3DStrategy
from lightning_3d.strategy.endings import Ending


@pytest.mark.parametrize(
    ("read", "missing"),
    [
        (
            lambda strategy: strategy.specs,
            "a model yet: the model of this rank is built when trainer.fit",
        ),
        (lambda strategy: strategy.engine, "a model yet"),
        (lambda strategy: strategy.training_step("batch"), "a model yet"),
        (
            lambda strategy: strategy.mesh,
            "process groups yet: ranks are connected when trainer.fit",
        ),
        (lambda strategy: strategy.distributed_sampler_kwargs, "process groups yet"),
        (lambda strategy: strategy.root_device, "devices yet: pass the strategy to a Trainer"),
    ],
)
def test_what_does_not_exist_yet_is_one_clear_error(
    read: Callable[[Any], Any], missing: str
) -> None:
    with pytest.raises(RuntimeError, match=f"Lightning3DStrategy does not have {missing}"):
        read(Lightning3DStrategy("tp2"))


def test_a_misspelt_argument_gets_a_suggestion() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            'Lightning3DStrategy has no argument "micro_batchsize". Did you mean'
            ' "micro_batch_size"?'
        ),
    ):
        Lightning3DStrategy("pp2", micro_batchsize=2)  # type: ignore[call-arg]
    assert list(inspect.signature(Lightning3DStrategy).parameters)[:2] == [
        "layout",
        "micro_batch_size",
    ]


def test_what_is_optional_is_none_before_the_model_is_built() -> None:
    strategy = Lightning3DStrategy("tp2_dp2", compile=True)
    assert (strategy.model_parts, strategy.compilation, strategy.last_step) == (None, None, None)
    assert (strategy.data_parallel_size, strategy.zero_stage, strategy.is_distributed) == (
        2,
        0,
        True,
    )


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (SIGTERMException(), Ending.TOGETHER),
        (NonFiniteError("the loss is nan"), Ending.TOGETHER),
        (NotSaved("the disk is full"), Ending.NORMAL),
        (ArithmeticError("on one rank"), Ending.ALONE),
        (KeyboardInterrupt(), Ending.ALONE),
    ],
)
def test_only_some_errors_are_raised_on_all_ranks(error: BaseException, ending: Ending) -> None:
    assert Ending.by(error) is ending


class WithLayerDrop(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(layerdrop=rate)


@pytest.mark.parametrize(
    ("layout", "stage"), [("dp2", 3), ("tp2", 0), ("pp2", 0), ("cp2", 1), ("ep2_dp2", 0)]
)
def test_blocks_that_are_skipped_at_random_are_refused_where_ranks_need_each_other(
    layout: str, stage: int
) -> None:
    """Each rank could skip other blocks: the ranks would wait for each other for ever."""
    with pytest.raises(
        ConfigError,
        match=r"WithLayerDrop skips blocks at random \(layerdrop=0.1\).*Set layerdrop=0",
    ):
        refuse_skipped_blocks(nn.Sequential(WithLayerDrop(0.1)), Layout.parse(layout), stage)
    refuse_skipped_blocks(WithLayerDrop(0.0), Layout.parse(layout), stage)
    refuse_skipped_blocks(WithLayerDrop(0.1), Layout.parse("dp2"), 2)
