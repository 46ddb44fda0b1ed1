"""Every option is declared once: YAML, docs, the strategy's signature and LightningCLI have its
name, type, default and help."""

import inspect
import io
import re
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from plain_module import LanguageModel, TextData

from lightning_3d.app.config.run_config import ParallelismConfig, TrainerConfig
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.options.options import COMMAND_LINE_DEFAULTS, OPEN, Options, command_line_options
from lightning_3d.options.schema import defaults_of, options_of
from lightning_3d.options.zero import ZeroArguments, ZeroOptions
from lightning_3d.strategy import Lightning3DStrategy
from lightning_3d.strategy.arguments import StrategyOptions

DOCS = Path(__file__).parents[2] / "docs"


def reference() -> Any:
    """The tool that writes YAML and docs."""
    specification = spec_from_file_location("reference", DOCS / "reference.py")
    assert specification is not None and specification.loader is not None
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def on_command_line() -> dict[str, Any]:
    return {
        one.name: COMMAND_LINE_DEFAULTS.get(one.name, (one.default,))[0]
        for one in command_line_options()
    }


def printed_by_lightning_cli(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr(sys, "argv", ["fit.py"])
    with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        LightningCLI(LanguageModel, TextData, args=["fit", *words], save_config_callback=None)
    return printed.getvalue()


def test_an_option_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = reference()
    assert tool.BASE.read_text("utf-8") == tool.base_yaml(), "run python docs/reference.py"
    written = yaml.safe_load(tool.base_yaml())
    assert {
        key: value for key, value in written.items() if not key.startswith("_")
    } == on_command_line()
    page = (DOCS / "configuration.md").read_text("utf-8")
    for part in ("parallelism", "script_defaults"):
        assert tool.PARTS[part]() in page, "run python docs/reference.py"

    of_a_run = {
        one.name: one.default for one in fields(ParallelismConfig) if not one.name.startswith("_")
    }
    assert of_a_run | {"layout": "tp1"} == on_command_line()

    signature = inspect.signature(Lightning3DStrategy)
    hints = get_type_hints(StrategyOptions)
    assert {name: one.default for name, one in signature.parameters.items()} == defaults_of(
        StrategyOptions
    )
    assert {name: one.annotation for name, one in signature.parameters.items()} == {
        name: hints[name] for name in signature.parameters
    }
    assert [*signature.parameters][0] == "layout" and signature.parameters[
        "layout"
    ].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    described = inspect.getdoc(Lightning3DStrategy.__init__) or ""
    assert re.findall(r"^    (\w+): ", described, re.MULTILINE) == [*defaults_of(StrategyOptions)]

    named = [
        "--trainer.strategy=lightning_3d.Lightning3DStrategy",
        "--trainer.strategy.layout=tp2",
        "--data.batch_size=8",
    ]
    shown = yaml.safe_load(printed_by_lightning_cli(monkeypatch, *named, "--print_config"))
    assert shown["trainer"]["strategy"]["init_args"] == defaults_of(StrategyOptions) | {
        "layout": "tp2"
    }
    helped = printed_by_lightning_cli(
        monkeypatch, "--trainer.strategy.help=lightning_3d.Lightning3DStrategy"
    )
    for one in options_of(StrategyOptions):
        assert f"--trainer.strategy.{one.name} " in helped
        assert one.metadata["help"].split()[-1].strip('()"') in helped


def test_defaults_differ_only_where_the_table_says_so() -> None:
    for name, (value, reason) in COMMAND_LINE_DEFAULTS.items():
        assert defaults_of(Options)[name] != value and reason
    assert set(OPEN) <= {one.name for one in command_line_options()}
    assert (TrainerConfig.nonfinite, TrainerConfig.trace_every_n_steps) == (
        Options.nonfinite,
        Options.trace_every_n_steps,
    )
    assert {f"zero_{one.name}" for one in fields(ZeroOptions)} - {"zero_gather_frozen"} == {
        *defaults_of(ZeroArguments)
    }


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"zero_stage": 4}, LayoutError, "zero_stage must be 0, 1, 2 or 3; got 4"),
        ({"recompute": "ful"}, ConfigError, 'Did you mean "full"'),
        ({"self_check": "nevr"}, ConfigError, "self_check must be"),
        ({"loss_chunks": 0}, ConfigError, "loss_chunks must be"),
        ({"moe_aux_loss": -1.0}, ConfigError, "moe_aux_loss must be"),
        ({"checkpoint_timeout_seconds": 0}, ConfigError, "checkpoint_timeout_seconds must be"),
        ({"recompute_every": 2}, ConfigError, "recompute_every=2 needs"),
        ({"plan": "auto", "self_check": "never"}, ConfigError, 'plan="auto" needs the self-check'),
    ],
)
def test_a_wrong_option_is_refused(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Options("dp2", **given)
