"""`lightning-3d draft-plan`: print a draft of the parallel plan of a model of the user's own."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import Namespace
from typing import Any

from lightning_3d.app.cli.options import Command
from lightning_3d.app.config.machine import hide_gpus
from lightning_3d.errors import ConfigError, PlanError, did_you_mean, listed
from lightning_3d.ranks.progress import task

COMMAND = Command(
    "draft-plan",
    "Draft the parallel plan of a model that declares none, ready to paste as"
    " Lightning3DStrategy(plan=...). The plan is derived from the flow of data through one block of"
    " each kind, with random weights, and then checked on CPU ranks of this machine. Parts that"
    " cannot be derived or proved are named in comments. Exit code 0: the plan is complete; 2: it"
    " is not.",
    takes="[KEY=VALUE]",
    examples=["my_project.model:MyModule", "my_project.model:MyModule layers=12 width=768 --tp 4"],
)
COMMAND.argument(
    "MODULE:NAME",
    "LightningModule or nn.Module: a class, a function that returns one, or an instance",
)
COMMAND.count("--tp", "number of tensor-parallel ranks to draft for; default: 2", default=2)
COMMAND.flag("--no-check", "do not start ranks to check the plan")
COMMAND.word("KEY=VALUE", "argument of the class or function; VALUE is YAML")

_MOST_RANKS = 8


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    return COMMAND.run(arguments, _draft, shown=(RuntimeError,))


def _draft(options: Namespace, words: list[str]) -> int:
    where, _, name = vars(options)["module:name"].partition(":")
    if not where or not name:
        raise ConfigError(
            "Write the model as MODULE:NAME, for example my_project.model:MyModule; got"
            f' "{vars(options)["module:name"]}".'
        )
    settings = dict(_setting(word) for word in words)
    hide_gpus()
    # before torch is imported: its threads would make forking unsafe
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with task(f"importing torch and {where}"):
        made = _found(where, name)

        from lightning_3d.engine.plan_draft import draft_plan
        from lightning_3d.engine.plan_draft.text import as_python

    with task(f"building {name}"):
        root = _built(made, settings, f"{where}:{name}")
    with task("deriving the plan from the flow of data"):
        draft = draft_plan(root, options.tp)
    layout = _layout(draft, root, options.tp)
    if not options.no_check and layout.world_size > 1:
        from lightning_3d.app.verification.plan_check import check_plan

        try:
            with task(f"checking the plan on {layout.world_size} ranks"):
                check_plan(root.get_submodule(draft.name), draft.plan, layout, draft.inputs)
        except PlanError as error:
            raise PlanError(
                f"The drafted plan is not printed, because it does not pass the self-check. {error}"
            ) from None
    elif draft.plan:
        print(
            "lightning_3d: the plan was not checked on ranks; the self-check of a run does that"
            " before its first step.",
            file=sys.stderr,
        )
    print(as_python(draft))
    if any(draft.problems.values()):
        print(
            "lightning_3d: the plan is incomplete; its comments say what cannot be derived, and"
            " why.",
            file=sys.stderr,
        )
        return ConfigError.exit_code
    print(
        f'lightning_3d: pass it as Lightning3DStrategy("{layout}", plan=plan), or use plan="auto".',
        file=sys.stderr,
    )
    return 0


def _setting(word: str) -> tuple[str, Any]:
    import yaml

    key, equals, value = word.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigError(
            f'Arguments of the model are written KEY=VALUE, for example layers=12; got "{word}".'
        )
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f'The value of {key} is not YAML: "{value}".') from None


def _found(where: str, name: str) -> Any:
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"There is no module {error.name} here or in this environment. Start this in your"
            " project's folder."
        ) from None
    if not hasattr(module, name):
        raise ConfigError(
            f"{where} has no"
            f' "{name}".{did_you_mean(name, [key for key in vars(module) if not key.startswith("_")])}'  # noqa: E501
        )
    return getattr(module, name)


def _built(made: Any, settings: dict[str, Any], what: str) -> Any:
    """Make the module, without values if its code allows that."""
    import torch
    from lightning.pytorch import LightningModule
    from torch import nn

    def build() -> Any:
        module = made if isinstance(made, nn.Module) else made(**settings)
        if isinstance(module, LightningModule):
            module.configure_model()
        return module

    if not isinstance(made, nn.Module) and not callable(made):
        raise ConfigError(
            f"{what} must be an nn.Module, or a class or function that returns one; got"
            f" {type(made).__name__}."
        )
    if isinstance(made, nn.Module) and settings:
        raise ConfigError(
            f"{what} is a module already, so it takes no arguments; got {listed(settings)}."
        )
    try:
        with torch.device("meta"):
            module = build()
    except Exception:  # code that reads values, as torch.linspace(...).tolist() does
        try:
            module = build()
        except TypeError as error:
            raise ConfigError(
                f"{what} cannot be called: {error}. Pass its arguments as KEY=VALUE."
            ) from None
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{what} must return an nn.Module; got {type(module).__name__}.")
    return module


def _layout(draft: Any, root: Any, tp: int) -> Any:
    """Layout that shows whether the plan is right: tp, and two stages where the plan has them and
    the ranks suffice."""
    from lightning_3d.layout.layout import Layout
    from lightning_3d.models.parallel_plan import read_plan

    model = root.get_submodule(draft.name)
    sharded = tp if "tp" in draft.plan else 1
    layers = read_plan(model, draft.plan).layers if draft.plan else ""
    blocks = len(list(model.get_submodule(layers).children())) if layers else 0
    return Layout(tp=sharded, pp=2 if blocks > 1 and 2 * sharded <= _MOST_RANKS else 1)
