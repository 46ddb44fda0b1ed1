"""The strategy by name: `Trainer(strategy="lightning_3d")`, and LightningCLI, which finds classes
as jsonargparse does."""

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from plain_module import LanguageModel, TextData

from lightning_3d.strategy import Lightning3DStrategy


def test_the_registered_name_is_data_parallel_over_all_ranks() -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy="lightning_3d", logger=False)
    assert type(trainer.strategy) is Lightning3DStrategy
    assert trainer.strategy.layout is not None and trainer.strategy.layout.name == "dp2"


def below(kind: type) -> list[type]:
    return [kind, *(deeper for direct in kind.__subclasses__() for deeper in below(direct))]


def test_a_subclass_of_strategy_has_the_registered_name() -> None:
    """jsonargparse takes the name of a class, looks among the subclasses that exist, and imports
    the one it found by its path."""
    (found,) = {kind for kind in below(Strategy) if kind.__name__ == "lightning_3d"}
    assert getattr(import_module(found.__module__), found.__qualname__) is found
    assert inspect.signature(found) == inspect.signature(Lightning3DStrategy)


COMMAND_LINES = {
    "name": ["--trainer.strategy=lightning_3d", "--trainer.strategy.layout=tp2_pp2"],
    "class": [
        "--trainer.strategy=lightning_3d.Lightning3DStrategy",
        "--trainer.strategy.layout=tp2_pp2",
    ],
    "short class": ["--trainer.strategy=Lightning3DStrategy", "--trainer.strategy.layout=tp2_pp2"],
}
MORE = [
    "--trainer.strategy.zero_stage=1",
    "--trainer.strategy.schedule=GPipe",
    "--trainer.strategy.timeout=0:10:00",
]


def parsed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The strategy that LightningCLI makes; nothing is started."""
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr(sys, "argv", ["fit.py"])
    on_cpu = ["--trainer.accelerator=cpu", "--trainer.devices=4", "--trainer.logger=false"]
    cli = LightningCLI(
        LanguageModel, TextData, run=False, args=[*on_cpu, *arguments], save_config_callback=None
    )
    return cli.trainer.strategy


@pytest.mark.parametrize("form", COMMAND_LINES)
def test_arguments_of_the_command_line_reach_the_strategy(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = parsed(monkeypatch, "--data.batch_size=8", *COMMAND_LINES[form], *MORE)
    assert isinstance(strategy, Lightning3DStrategy) and strategy.layout is not None
    assert (strategy.layout.name, strategy.schedule, strategy.zero_stage) == ("tp2_pp2", "GPipe", 1)


def test_a_configuration_file_names_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fit.yaml").write_text(
        "trainer:\n  strategy:\n    class_path: lightning_3d.Lightning3DStrategy\n    init_args:"
        " {layout: tp2_pp2, plan: {tp: {up: colwise}}, order: [tp, cp, dp, pp]}\ndata: {batch_size:"
        " 8}\n"
    )
    strategy = parsed(monkeypatch, f"--config={tmp_path / 'fit.yaml'}")
    assert strategy.layout.order == ("tp", "cp", "dp", "pp") and strategy._sources.plan == {
        "tp": {"up": "colwise"}
    }


def test_an_argument_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(
            monkeypatch,
            "--data.batch_size=8",
            *COMMAND_LINES["name"],
            "--trainer.strategy.zero_stge=1",
        )
    assert ended.value.code == 2 and "zero_stge" in capsys.readouterr().err
