"""The LightningModule of a run, by its objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_3d.app.config.objective import DISTILLATION, DPO, ObjectiveOptions
from lightning_3d.app.training.distillation import DistilledLM
from lightning_3d.app.training.module import CausalLM
from lightning_3d.app.training.preference import PreferenceLM


def make_module(config: Mapping[str, Any], teacher: Mapping[str, Any] | None = None) -> CausalLM:
    """Build the module that the groups `model` and `optimizer` and the keys `objective` describe.

    Args:
        teacher: `model_type` and fields of a teacher with new weights, in place of the folder
            `objective.teacher`.
    """
    # a configuration of an earlier version has none
    options = ObjectiveOptions(**config.get("objective", {}))
    if options.name == DPO:
        return PreferenceLM(config["model"], config["optimizer"], beta=options.beta)
    if options.name == DISTILLATION:
        second = options.teacher if teacher is None else teacher
        assert second is not None
        more = {"temperature": options.temperature, "teacher_weight": options.teacher_weight}
        return DistilledLM(config["model"], config["optimizer"], teacher=second, **more)
    return CausalLM(config["model"], config["optimizer"])
