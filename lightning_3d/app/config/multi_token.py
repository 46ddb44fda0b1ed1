"""Multi-token prediction of a run by configuration: the keys `model.mtp_layers` and
`model.mtp_loss_weight`. Pure: no torch.

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_3d.app.config.objective import LANGUAGE_MODEL
from lightning_3d.errors import ConfigError, listed
from lightning_3d.layout.sizes import check_number

FAMILIES = ("deepseek_v3",)
"""Values of `model_type` whose models can be trained with further tokens."""

MOST = 16


@dataclass(frozen=True)
class MultiTokenOptions:
    """Modules behind the model that predict the tokens after the next one.

    Attributes:
        layers: number of modules; None trains the model without.
        loss_weight: weight of the mean of their losses, which is added to the loss of the model.
    """

    layers: int | None = None
    loss_weight: float = 0.3

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> MultiTokenOptions:
        """Read the keys of the group `model`.

        Raises:
            ConfigError: a value out of range, a family without these modules, or adapters.
        """
        given = {"layers": model.get("mtp_layers"), "loss_weight": model.get("mtp_loss_weight")}
        options = cls(**{key: value for key, value in given.items() if value is not None})
        check_number("model.mtp_loss_weight", options.loss_weight)
        if options.layers is not None:
            options._check(model)
        return options

    def _check(self, model: Mapping[str, Any]) -> None:
        if (
            isinstance(self.layers, bool)
            or not isinstance(self.layers, int)
            or not 1 <= self.layers <= MOST
        ):
            raise ConfigError(
                f"model.mtp_layers must be a whole number from 1 to {MOST}, or null to train"
                f" without multi-token prediction; got {self.layers!r}."
            )
        kind = (model.get("config") or {}).get("model_type")
        if kind is not None and kind not in FAMILIES:
            raise ConfigError(
                f"model.mtp_layers={self.layers} needs a model of model_type"
                f" {listed(FAMILIES, last='or')}; this one is {kind}. Use model.mtp_layers=null."
            )
        if (model.get("lora") or {}).get("r") is not None:
            raise ConfigError(
                "model.lora.r trains adapters alone, so the modules of"
                f" model.mtp_layers={self.layers} would stay random. Use model.mtp_layers=null, or"
                " model.lora.r=null."
            )

    def check_run(self, objective: str, sequence_length: int | None) -> None:
        """Refuse what multi-token prediction cannot be trained with.

        Args:
            objective: name of the objective of the run.
            sequence_length: tokens of a sample; None where it is not known.

        Raises:
            ConfigError: another objective, or samples that are too short.
        """
        if self.layers is None:
            return
        what = f"model.mtp_layers={self.layers}"
        if objective != LANGUAGE_MODEL:
            raise ConfigError(
                f"{what} is trained with objective.name={LANGUAGE_MODEL} only; got {objective}. Use"
                " model.mtp_layers=null."
            )
        if sequence_length is not None and sequence_length < self.layers + 2:
            raise ConfigError(
                f"{what} predicts the token {self.layers + 1} ahead, which samples of"
                f" {sequence_length} tokens do not have. Use data.sequence_length={self.layers + 2}"
                " or more."
            )
