"""Parameter groups that a run has more or fewer of than its checkpoint, and stages without
parameters of a group."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_3d.checkpoint import describe_optimizer, restore_hyper_parameters, take_groups
from lightning_3d.errors import CheckpointError

STAGES = "lightning_3d_pipeline_ranks"
DECAYED, UNDECAYED, SLOW = (
    {"weight_decay": 0.1},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "lr": 0.01},
)

Groups = list[tuple[list[str], dict[str, float]]]


class Stage:
    """An optimizer of the groups (names of their parameters, options), and its schedule."""

    def __init__(self, groups: Groups) -> None:
        self.names = [names for names, _ in groups]
        self.parameters = {
            name: nn.Parameter(torch.ones(1)) for names in self.names for name in names
        }
        made = [
            {"params": [self.parameters[name] for name in names], **options}
            for names, options in groups
        ]
        self.optimizer = torch.optim.AdamW(made, lr=0.1)
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def train(self, steps: int) -> "Stage":
        for _ in range(steps):
            self.optimizer.step()
            self.schedule.step()
        return self

    def save(self) -> dict[str, Any]:
        described = describe_optimizer(self.optimizer, self.names)
        return {"optimizer_states": [described], "lr_schedulers": [self.schedule.state_dict()]}

    def resume(self, checkpoint: dict[str, Any]) -> "Stage":
        taken = take_groups(checkpoint, self.names)
        restore_hyper_parameters(self.optimizer, taken["optimizer_states"][0])
        self.schedule.load_state_dict(taken["lr_schedulers"][0])
        return self

    def values(self) -> list[tuple[float, float]]:
        return [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]


TWO: Groups = [(["a", "b"], DECAYED), (["norm", "embed"], UNDECAYED)]


def test_a_group_that_is_new() -> None:
    """Its parameters keep the values that they had, and the schedule continues for all three
    groups."""
    saved = Stage(TWO).train(2).save()
    resumed = (
        Stage([(["a", "b"], DECAYED), (["norm"], UNDECAYED), (["embed"], SLOW)])
        .resume(saved)
        .train(1)
    )
    assert resumed.values() == [
        (pytest.approx(0.025), 0.1),
        (pytest.approx(0.025), 0.0),
        (pytest.approx(0.025), 0.0),
    ]


def test_a_group_that_is_gone() -> None:
    three: Groups = [(["a"], DECAYED), (["b"], DECAYED), (["norm", "embed"], SLOW)]
    resumed = Stage(TWO).resume(Stage(three).train(2).save()).train(1)
    assert resumed.values() == [(pytest.approx(0.025), 0.1), (pytest.approx(0.0025), 0.0)]
    three = [(["a", "b"], DECAYED), (["norm"], UNDECAYED), (["embed"], SLOW)]
    with pytest.raises(
        CheckpointError,
        match=(
            "Parameter group 1 has parameters that were in 2 groups with different hyperparameters"
        ),
    ):
        Stage(TWO).resume(Stage(three).train(2).save())


def test_a_stage_without_parameters_of_a_new_group() -> None:
    saved = Stage(TWO).train(2).save()
    resumed = Stage([(["b"], DECAYED), (["norm"], UNDECAYED), ([], SLOW)]).resume(saved).train(1)
    assert resumed.values()[:2] == [(pytest.approx(0.025), 0.1), (pytest.approx(0.025), 0.0)]


def test_a_stage_that_had_fewer_groups() -> None:
    """Earlier versions made no group on a stage without parameters of it."""
    first, last = (
        Stage([(["a"], DECAYED)]).train(2).save(),
        Stage([(["b"], DECAYED), (["norm"], SLOW)]).train(2).save(),
    )
    saved = first | {STAGES: [first, last]}
    assert Stage([(["a"], DECAYED), ([], SLOW)]).resume(saved).train(1).values()[0] == (
        pytest.approx(0.025),
        0.1,
    )
    resumed = Stage([(["b"], DECAYED), (["norm"], SLOW)]).resume(saved).train(1)
    assert resumed.values() == [(pytest.approx(0.025), 0.1), (pytest.approx(0.0025), 0.0)]


def test_a_new_group_of_parameters_that_were_not_trained() -> None:
    with pytest.raises(
        CheckpointError, match="has 2 parameter groups, but configure_optimizers returned 3"
    ):
        Stage([*TWO, (["new"], SLOW)]).resume(Stage(TWO).train(2).save())


def test_a_checkpoint_does_not_choose_kernels() -> None:
    """It may come from a GPU, where an optimizer is fused by default."""
    saved, resumed = Stage(TWO), Stage(TWO)
    for group in saved.optimizer.param_groups:
        group.update(fused=True, capturable=True, lr=0.5)
    resumed.resume(saved.save())
    assert [
        (group["fused"], group["capturable"], group["lr"])
        for group in resumed.optimizer.param_groups
    ] == [(None, False, 0.5)] * 2
