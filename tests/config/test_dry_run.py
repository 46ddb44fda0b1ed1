"""A dry run refuses what a run would refuse before it builds its model."""

from pathlib import Path

import pytest
from composed_configs import composed

from lightning_3d.app.config.plan_run import plan_run
from lightning_3d.app.config.targets import ALLOW_VARIABLE
from lightning_3d.app.training import dry
from lightning_3d.app.training.dry import show_plan
from lightning_3d.errors import Lightning3DError

SHORT = (
    "trainer.dry=true",
    "cluster=local_cpu",
    "parallelism=dp1",
    "data.sequence_length=64",
    "data.global_batch_size=4",
)
TORCH = "optimizer=torch"
REFUSED = {
    "optimizer": (
        (TORCH, "optimizer._target_=torch.optim.Nope"),
        r"Cannot create optimizer \(torch.optim.Nope\)",
    ),
    "its argument": (
        (TORCH, "optimizer._target_=torch.optim.SGD", "+optimizer.momentumm=0.5"),
        r"momentumm.*Did you mean .momentum",
    ),
    "schedule": (
        ("~optimizer.scheduler", "+optimizer.scheduler._target_=torch.optim.lr_scheduler.Nope"),
        r"Cannot create optimizer.scheduler \(torch.optim.lr_scheduler.Nope\)",
    ),
    "Trainer": (
        ("+trainer.extra.deterministi=true",),
        'trainer.extra.deterministi is not an argument.*Did you mean "deterministic"',
    ),
    "profiler": (
        ("+trainer.extra.profiler._target_=lightning.pytorch.profilers.Nope",),
        r"Cannot create trainer.extra.profiler",
    ),
    "callback": (
        ("+callbacks.mine._target_=lightning.pytorch.callbacks.Nope",),
        r"Cannot create callbacks.mine",
    ),
    "argument of a callback": (
        ("+callbacks.progress.evry=3",),
        "callbacks.progress.*'evry'.*Did you mean \"every\"",
    ),
    "token file": (
        ("data=tokens", "data.train_path=/nowhere/tokens.bin"),
        "There is no token file /nowhere/tokens.bin",
    ),
    "text": (
        ("data=huggingface", "data.path=/nowhere/text", "data.tokenizer=gpt2"),
        "The data set /nowhere/text does not exist",
    ),
    "package": (
        ("+logger.other._target_=lightning.pytorch.loggers.CometLogger",),
        "needs the package comet-ml",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_the_run_names_must_exist(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "")
    overrides, message = REFUSED[case]
    plan = plan_run(composed(*SHORT, *overrides))
    with pytest.raises(Lightning3DError, match=message):
        show_plan(plan, None)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_classes_and_arguments_that_exist_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    mine = (
        "+callbacks.mine._target_=lightning.pytorch.callbacks.LearningRateMonitor",
        "+callbacks.mine.logging_interval=step",
    )
    show_plan(
        plan_run(
            composed(
                *SHORT,
                *mine,
                "+trainer.extra.detect_anomaly=true",
                TORCH,
                "optimizer._target_=torch.optim.SGD",
            )
        ),
        None,
    )
    assert capsys.readouterr().out.startswith("tp1: 1 rank on CPU")


def test_files_of_other_machines_are_only_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = (
        "cluster=h100_1x8",
        "parallelism=dp8",
        "data.global_batch_size=16",
        "data=tokens",
        "data.train_path=/nowhere/tokens.bin",
    )
    show_plan(plan_run(composed(*SHORT, *overrides)), None)
    captured = capsys.readouterr()
    assert captured.out.startswith("dp8: 8 ranks on GPUs")
    assert "On this machine: There is no token file /nowhere/tokens.bin" in captured.err


def test_a_run_that_names_only_shipped_classes_is_checked_without_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A dry run answers within a second."""
    monkeypatch.setattr(dry, "_check_named", lambda *_, **__: pytest.fail("torch is imported"))
    for logger in ("none", "csv", "tensorboard"):
        show_plan(plan_run(composed(*SHORT, f"logger={logger}", f"run_folder={tmp_path}")), None)
    assert capsys.readouterr().out.count("tp1: 1 rank on CPU") == 3
