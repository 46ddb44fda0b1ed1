"""The keys `objective`: recipes that use them, and what is refused before a rank is started."""

from pathlib import Path

import pytest
from composed_configs import composed

from lightning_3d.app.config.objective import ObjectiveOptions
from lightning_3d.app.config.plan_run import plan_run
from lightning_3d.errors import ConfigError

DRY = ("cluster=local_cpu", "trainer.dry=true")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("objective.name=dop",),
            (
                "objective.name must be language_model, dpo or distillation; got 'dop'. Did you"
                ' mean "dpo"'
            ),
        ),
        (
            ("objective.name=dpo",),
            "data=python_stdlib does not fit objective.name=dpo. .* (data=python_pairs)",
        ),
        (("data=python_pairs",), "data=python_pairs does not fit objective.name=language_model"),
        (("objective.name=dpo", "data=python_pairs"), "objective.name=dpo needs model.pretrained"),
        (("objective.name=distillation",), "needs objective.teacher, a folder"),
        (("recipe=llama_tiny_distill_2xcpu", "trainer.dry=false"), "Set objective.teacher=FOLDER"),
        (("recipe=llama_tiny_dpo_2xcpu", "trainer.dry=false"), "Set model.pretrained=PATH"),
        (("recipe=llama_tiny_distill_2xcpu", "model.lora.r=4"), "Remove model.lora.r"),
        (("objective.beta=0",), "objective.beta must be"),
        (("objective.teacher_weight=1.5",), "objective.teacher_weight must be"),
        (
            ("+objective.betta=1",),
            'no configuration key "objective.betta". Did you mean "objective.beta"',
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(").replace(")", r"\)")):
        plan_run(composed(*DRY, *overrides))


@pytest.mark.parametrize(("name", "layout"), [("dpo", "pp2"), ("distill", "dp2")])
def test_the_recipes_are_planned_without_their_folder(name: str, layout: str) -> None:
    recipe = f"llama_tiny_{name}_2xcpu"
    plan = plan_run(composed("trainer.dry=true", f"recipe={recipe}"))
    assert (plan.layout.name, plan.accelerator) == (layout, "cpu")
    assert f"train.py recipe={recipe} " in (Path("recipes") / f"{recipe}.yaml").read_text()


def test_a_command_without_weights_reads_the_configuration_of_the_teacher_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 32, "vocab_size": 67, "torch_dtype": "float32"}'
    )
    objective = ObjectiveOptions("distillation", teacher=str(tmp_path))
    assert objective.teacher_fields(67) == {
        "model_type": "llama",
        "hidden_size": 32,
        "vocab_size": 67,
    }
    assert ObjectiveOptions("dpo").teacher_fields(67) is None
    with pytest.raises(ConfigError, match="has a vocabulary of 67 tokens, but the model has 257"):
        objective.teacher_fields(257)
    with pytest.raises(ConfigError, match="Set objective.teacher=FOLDER"):
        ObjectiveOptions("distillation", teacher="required").teacher_fields(67)
