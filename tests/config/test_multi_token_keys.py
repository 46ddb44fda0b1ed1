"""The keys `model.mtp_layers` and `model.mtp_loss_weight`: what is refused before a rank is
started, and what the planner counts."""

from typing import Any

import pytest
import torch
from composed_configs import composed
from models import conf

from lightning_3d.app.config.plan_run import plan_run
from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.constants import OURS
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.stages import parameters_of, stages_of
from lightning_3d.app.training.module import CausalLM
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.models.families import read_spec
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.pipeline.stages import assign_stages

DRY = (
    "cluster=local_cpu",
    "trainer.dry=true",
    "parallelism=pp2",
    "model=deepseek_v3_tiny",
    "model.mtp_layers=2",
)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("model.mtp_layers=0",), "must be a whole number from 1 to 16, or null .* got 0"),
        (("model.mtp_layers=two",), "got 'two'"),
        (("model.mtp_loss_weight=-1",), "model.mtp_loss_weight must be"),
        (
            ("model=llama_tiny",),
            (
                "model.mtp_layers=2 needs a model of model_type deepseek_v3; this one is llama. Use"
                " model.mtp_layers=null"
            ),
        ),
        (("model.lora.r=4",), "would stay random"),
        (
            ("objective.name=distillation", "objective.teacher=there"),
            "with objective.name=language_model only; got distillation",
        ),
        (
            ("data.sequence_length=3",),
            "predicts the token 3 ahead, .* Use data.sequence_length=4 or more",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=says):
        plan_run(composed(*DRY, *overrides))


@pytest.mark.parametrize("layout", ["pp2", "pp2_cp2"])
def test_a_run_is_planned(layout: str) -> None:
    plan = plan_run(composed(*DRY, f"parallelism={layout}"))
    assert (plan.run.ahead.layers, plan.run.ahead.loss_weight, plan.run.spec.ahead) == (2, 0.3, 2)


def built(ahead: int, **changes: Any) -> tuple[dict[str, Any], Any]:
    """The fields of a configuration, and the model on meta."""
    group = conf("deepseek_v3_tiny")
    group = group | {"config": group["config"] | changes, "mtp_layers": ahead}
    module = CausalLM(group)
    with torch.device("meta"):
        module.configure_model()
    return group["config"], module.model


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_planner_and_engine_agree(ahead: int, pp: int) -> None:
    fields, model = built(ahead, num_hidden_layers=7)
    spec = read_spec(fields, ahead)
    assert spec.shapes == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    sizes, layout = Architecture.from_spec(spec), Layout(pp=pp)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert spec.parameters == sizes.parameters == total
    assert spec.flops_per_token(64) == sizes.model_flops(64)
    job = Job(sizes, layout, 64, 64, 1, stack=OURS)
    stages = stages_of(job)
    assert sum(sum(parameters_of(job, stage)) for stage in stages) == total
    found = assign_stages(model, read_plan(model), layout, "1F1B").layers
    assert [stage.blocks for stage in stages] == [len(blocks) for blocks in found]
    assert found[-1].stop == 7 + ahead
