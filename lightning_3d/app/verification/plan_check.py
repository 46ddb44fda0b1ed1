"""Check a plan with the self-check of a run, on CPU ranks of this machine."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.engine.plan_draft.inputs import Inputs
from lightning_3d.engine.self_check.check import SelfCheck
from lightning_3d.errors import PlanError
from lightning_3d.layout.layout import Layout
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.options.experts import ExpertOptions
from lightning_3d.options.model import ModelOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.tensor import fit_styles
from lightning_3d.ranks.supervisor import can_fork, launch


def check_plan(model: nn.Module, plan: dict[str, Any], layout: Layout, inputs: Inputs) -> None:
    """Compare a model with itself as a plan shards it, on as many CPU ranks as the layout has. Rank
    0 prints the result.

    Args:
        model: whole model, with values or on the meta device.
        plan: its parallel plan.
        layout: layout of tp and pp.
        inputs: inputs with which it runs.

    Raises:
        PlanError: the sharded model does not compute what the whole one computes, or cannot be
            compared.
        RuntimeError: a rank failed for another reason.
    """
    with tempfile.TemporaryDirectory(prefix="lightning_3d_plan_") as folder:
        outcome = launch(
            _on_rank,
            (model, plan, layout, inputs),
            layout.world_size,
            logs=Path(folder),
            fork=can_fork(),
            threads=1,
        )
    if outcome.exit_code and outcome.message is None:  # a signal
        raise (
            KeyboardInterrupt
            if outcome.exit_code == 128 + signal.SIGINT
            else SystemExit(outcome.exit_code)
        )
    if outcome.exit_code:
        kind = PlanError if outcome.exit_code == PlanError.exit_code else RuntimeError
        raise kind(str(outcome.message).removeprefix("lightning_3d: "))


def _on_rank(model: nn.Module, plan: dict[str, Any], layout: Layout, inputs: Inputs) -> None:
    dist.init_process_group("gloo")
    try:
        mesh = Mesh(layout)
        mesh.warm_up()
        check = SelfCheck(
            "always",
            mesh,
            ModelOptions("1F1B", BlockOptions(), ExpertOptions()),
            torch.device("cpu"),
        )
        check.inspect(model, fit_styles(model, read_plan(model, plan), layout.tp), declared=False)
        check.compare(model, inputs.args, dict(inputs.kwargs))
    finally:
        dist.destroy_process_group()
