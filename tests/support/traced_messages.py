"""A fit whose last step is traced, with small buckets, over gloo or shared memory."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from counting import Call, recording
from parity import Module, Rows, quiet_trainer
from reference import Recipe, data
from torch.utils.data import DataLoader

from lightning_3d.app.training.callbacks import MetricsCSV
from lightning_3d.app.training.timeline import RunReport, Timeline
from lightning_3d.layout import Layout
from lightning_3d.parallel import host_channel
from lightning_3d.parallel.zero import make_backend
from lightning_3d.tracing.trace import StepTrace

STEPS = 3


def traced_messages(
    folder: str,
    layout: str,
    *,
    model: str = "llama",
    bucket_bytes: int = 1 << 14,
    shared_memory: bool = False,
    **strategy: Any,
) -> tuple[StepTrace | None, list[Call]]:
    """Return the trace of the last step, with events on rank 0, and what this rank sent in all
    steps, counted by other means."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe, path = Recipe(model, steps=STEPS), Path(folder)
    connect = (
        nullcontext() if shared_memory else patch.object(host_channel, "connect", return_value=None)
    )
    with (
        connect,
        recording() as recorder,
        patch.dict(make_backend.__kwdefaults__, bucket_bytes=bucket_bytes),
    ):
        plan = Lightning3DStrategy(
            layout, micro_batch_size=2, trace_every_n_steps=STEPS, self_check="never", **strategy
        )
        trainer = quiet_trainer(
            strategy=plan,
            devices=Layout.parse(layout).world_size,
            max_steps=STEPS,
            callbacks=[
                MetricsCSV(path / "metrics.csv"),
                Timeline(path / "timeline.json"),
                RunReport(path),
            ],
        )
        trainer.fit(Module(recipe), DataLoader(Rows(data(recipe)), batch_size=4))
    return plan.last_step.trace, recorder.calls
