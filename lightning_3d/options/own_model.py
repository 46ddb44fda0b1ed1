"""Options for models that declare no parallel plan, and the self-check. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from lightning_3d.errors import ConfigError, did_you_mean
from lightning_3d.options.schema import OptionGroup, one_of, option

AUTO = "auto"
MODES = (AUTO, "always", "never")
"""Values of `self_check`."""


def _check_plan(name: str, plan: Any) -> None:
    if isinstance(plan, str) and plan != AUTO:
        raise ConfigError(
            f'{name} must be "auto" or a dictionary with the keys "tp" and "pp"; got'
            f' "{plan}".{did_you_mean(plan, [AUTO])}'
        )
    if plan is not None and not isinstance(_plain(plan), (str, dict)):
        raise ConfigError(
            f'{name} must be "auto" or a dictionary with the keys "tp" and "pp"; got a'
            f" {type(plan).__name__}."
        )


def _plain(plan: Any) -> Any:
    """Return the dictionary of a configuration of OmegaConf; anything else as it is."""
    # only who imported it can have made a configuration; a script may lack it
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(plan):
        return omegaconf.OmegaConf.to_container(plan, resolve=True)
    return plan


@dataclass(frozen=True, kw_only=True)
class OwnModelOptions(OptionGroup):
    """Options for a model that declares no parallel plan, and for the check of a rewritten model.

    Raises:
        ConfigError: another value, or "auto" without the self-check that proves the drafted plan.
    """

    self_check: str = option(
        AUTO,
        "when to compare the rewritten model with the original before its first forward, with tp,"
        " pp, cp or ep above 1. auto skips the comparison if it has passed before for this"
        " combination of model, plan, layout and versions. The other values are always and never",
        one_of(*MODES),
    )
    plan: dict[str, Any] | str | None = option(
        None,
        "parallel plan of a model that declares none: {tp: {PATTERN: STYLE}, pp: {MODULE: [[INPUT],"
        " [OUTPUT]]}}. auto derives it from the model",
        _check_plan,
    )
    pipeline_module: str | None = option(
        None, "name of the submodule to parallelize, if several submodules have a plan"
    )

    def check_together(self) -> None:
        """Refuse a drafted plan that nothing proves, and make a plan of OmegaConf a dictionary."""
        object.__setattr__(self, "plan", _plain(self.plan))
        if self.plan == AUTO and self.self_check == "never":
            raise ConfigError(
                'plan="auto" needs the self-check, which compares the drafted plan with one'
                ' process. Use self_check="auto", or paste the plan that `lightning-3d draft-plan`'
                " prints."
            )
