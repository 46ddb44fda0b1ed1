"""A checkpoint of a run with a fused optimizer resumes with one that is not fused, and the other
way round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fits import TiedModel, make_trainer
from parity import StepValues
from ranks import run_ranks

from lightning_3d.layout import Layout

MODES: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("tp2", torch.optim.AdamW, {"zero_stage": 0}),
    ("dp2", torch.optim.AdamW, {"zero_stage": 1}),
    ("dp2", torch.optim.AdamW, {"zero_stage": 3, "precision": "bf16-true"}),
    ("dp2", torch.optim.Adagrad, {"zero_stage": 0}),
    ("dp2", torch.optim.SGD, {"zero_stage": 1}),
    ("dp2", torch.optim.AdamW, {"zero_stage": 1, "zero_offload": "optimizer"}),
]


def fit(
    layout: str,
    kind: type[torch.optim.Optimizer],
    fused: bool,
    epochs: int,
    resume: str | None,
    save: str | None,
    **options: Any,
) -> tuple[list[float], set[Any], set[torch.dtype]]:
    """(losses of all steps, `fused` of the optimizer's groups at the end, types of its step
    counts)."""

    class Model(TiedModel):
        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=1e-2, fused=True if fused else None)  # type: ignore[call-arg]

    values = StepValues()
    trainer, rows = make_trainer(layout, epochs, [values], **options)
    trainer.fit(Model(), datamodule=rows, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    [optimizer] = trainer.optimizers
    steps = {
        state["step"].dtype
        for state in optimizer.state.values()
        if isinstance(state.get("step"), torch.Tensor)
    }
    return values.losses, {group.get("fused") for group in optimizer.param_groups}, steps


BOTH = [(saved, *mode) for mode in MODES for saved in (True, False)]


@pytest.mark.full
@pytest.mark.parametrize(("saved", "layout", "kind", "options"), BOTH, ids=str)
def test_a_run_resumes_with_the_other_kernels(
    saved: bool,
    layout: str,
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Losses are those of a run that never stops, and the kernels those that the module asks for
    now."""
    ranks, path = Layout.parse(layout).world_size, str(tmp_path / "saved.ckpt")
    straight, *_ = run_ranks(fit, ranks, layout, kind, saved, 2, None, None, **options)[0]
    first, *_ = run_ranks(fit, ranks, layout, kind, saved, 1, None, path, **options)[0]
    for then, fused, steps in run_ranks(
        fit, ranks, layout, kind, not saved, 2, path, None, **options
    ):
        assert fused == {None if saved else True}
        assert steps <= {torch.float32}
        assert len(first) + len(then) == len(straight)
        assert first + then == pytest.approx(straight, rel=1e-5)
