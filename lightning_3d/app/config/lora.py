"""LoRA of a run by configuration: keys of `model.lora`. Pure: no torch, no PEFT.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any

from lightning_3d.errors import ConfigError, did_you_mean, install, listed


@dataclass(frozen=True)
class LoraOptions:
    """Adapters that are trained while the weights stay frozen.

    Attributes:
        r: rank of the adapters; None trains all weights.
        alpha: scale of the adapters, which is alpha / r.
        dropout: dropout of the adapters' input, 0 to 1.
        target_modules: names of the layers that get adapters, or "all-linear": all but the output
            head.
    """

    r: int | None = None
    alpha: float = 16
    dropout: float = 0.0
    target_modules: str | list[str] = field(default="all-linear")

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> LoraOptions:
        """Read the options of the group `model`.

        Raises:
            ConfigError: an unknown key, a value out of range, or PEFT is not installed.
        """
        given = model.get("lora") or {}
        known = [option.name for option in fields(cls)]
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"model.lora must have the keys {listed(known)}, for example model.lora.r=16; got"
                f" {given!r}."
            )
        for key in given:
            if key not in known:
                near = did_you_mean(str(key), known).replace('"', '"model.lora.', 1)
                raise ConfigError(
                    f'There is no configuration key "model.lora.{key}".{near} model.lora has'
                    f" {listed(known)}."
                )
        options = cls(**given)
        if options.r is not None:
            options._check()
        return options

    def _check(self) -> None:
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ConfigError(
                "model.lora.r must be a whole number of at least 1, or null to train all weights;"
                f" got {self.r!r}."
            )
        for name, value, holds, wanted in (
            ("alpha", self.alpha, lambda x: x > 0, "above 0"),
            ("dropout", self.dropout, lambda x: 0 <= x < 1, "of at least 0 and less than 1"),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
                raise ConfigError(f"model.lora.{name} must be a number {wanted}; got {value!r}.")
        names = self.target_modules
        if not names or not (
            isinstance(names, str) or all(isinstance(name, str) for name in names)
        ):
            raise ConfigError(
                "model.lora.target_modules must be names of layers, such as [q_proj,v_proj], or"
                f" all-linear; got {names!r}."
            )
        if find_spec("peft") is None:
            raise ConfigError(f"model.lora needs the package peft. {install('peft')}.")
