"""The option `plan` of the strategy: a model's parallel plan. Pure: no torch."""

from __future__ import annotations

import sys
from typing import Any

from lightning_3d.errors import ConfigError, did_you_mean

AUTO = "auto"


def check_plan(plan: Any, self_check: str) -> Any:
    """Return `plan` if it is a dictionary, "auto" or None; a configuration of OmegaConf becomes a
    dictionary.

    Raises:
        ConfigError: another value, or "auto" without the self-check that proves the drafted plan.
    """
    # only who imported it can have made a configuration; a script may lack it
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(plan):
        plan = omegaconf.OmegaConf.to_container(plan, resolve=True)
    if isinstance(plan, str) and plan != AUTO:
        raise ConfigError(
            'plan must be "auto" or a dictionary with the keys "tp" and "pp"; got'
            f' "{plan}".{did_you_mean(plan, [AUTO])}'
        )
    if plan is not None and not isinstance(plan, (str, dict)):
        raise ConfigError(
            'plan must be "auto" or a dictionary with the keys "tp" and "pp"; got a'
            f" {type(plan).__name__}."
        )
    if plan == AUTO and self_check == "never":
        raise ConfigError(
            'plan="auto" needs the self-check, which compares the drafted plan with one process.'
            ' Use self_check="auto", or paste the plan that `lightning-3d draft-plan` prints.'
        )
    return plan
