"""What a run trains its model for: keys `objective`. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_3d.errors import ConfigError, did_you_mean, listed
from lightning_3d.layout.sizes import check_number
from lightning_3d.models.families import read_spec
from lightning_3d.models.pretrained_config import TAKEN, architecture, complete_model
from lightning_3d.models.safetensors_folder import find_folder
from lightning_3d.models.spec import ModelSpec

LANGUAGE_MODEL, DPO, DISTILLATION = "language_model", "dpo", "distillation"
OBJECTIVES = (LANGUAGE_MODEL, DPO, DISTILLATION)
REQUIRED = "required"
"""Stands for a folder that a recipe leaves to the user."""
_NO_TEACHER = "This run needs a teacher. Set objective.teacher=FOLDER."
PAIRS = ("python_pairs",)
"""Data options whose samples are pairs of a chosen and a rejected answer."""


@dataclass(frozen=True)
class ObjectiveOptions:
    """Keys `objective`.

    Attributes:
        name: `language_model` (predict the next token), `dpo` (prefer one answer to another,
            arXiv:2305.18290) or `distillation` (predict the next token as a teacher does,
            arXiv:1503.02531).
        beta: of DPO, above 0: how strongly the model is kept near the reference.
        teacher: folder of a pretrained causal LM in Transformers' format with the same vocabulary,
            for distillation.
        temperature: of distillation, above 0; both distributions are softened by it.
        teacher_weight: weight of the teacher's part of the loss, 0 to 1; the rest is the
            cross-entropy with the data.
    """

    name: str = LANGUAGE_MODEL
    beta: float = 0.1
    teacher: str | None = None
    temperature: float = 2.0
    teacher_weight: float = 0.5

    def check(self) -> None:
        """Raise ConfigError for an unknown name, a number out of range, or distillation without a
        teacher."""
        if self.name not in OBJECTIVES:
            near = did_you_mean(str(self.name), OBJECTIVES)
            raise ConfigError(
                f"objective.name must be {listed(OBJECTIVES, last='or')}; got {self.name!r}.{near}"
            )
        check_number("objective.beta", self.beta, least=1e-6)
        check_number("objective.temperature", self.temperature, least=1e-6)
        check_number("objective.teacher_weight", self.teacher_weight, most=1.0)
        if self.name == DISTILLATION and self.teacher is None:
            raise ConfigError(
                "objective.name=distillation needs objective.teacher, a folder of pretrained"
                " weights, such as one that lightning-3d export wrote."
            )

    def check_run(self, model: Mapping[str, Any], data: Mapping[str, Any], *, dry: bool) -> None:
        """Refuse a model or data that do not fit the objective.

        Args:
            dry: whether no run is started, so that the teacher may be named later.

        Raises:
            ConfigError: DPO without pretrained weights, with adapters or with other data than
                pairs; pairs without DPO.
        """
        if self.name == DISTILLATION and self.teacher == REQUIRED and not dry:
            raise ConfigError(_NO_TEACHER)
        pairs = data.get("name") in PAIRS
        if pairs != (self.name == DPO):
            raise ConfigError(
                f"data={data.get('name')} does not fit objective.name={self.name}. DPO reads pairs"
                f" of answers (data={PAIRS[0]}), and nothing else does."
            )
        if self.name == DPO and data.get("document_mask"):
            raise ConfigError(
                "data.document_mask has no meaning for pairs of answers: each answer is a sample of"
                " its own. Remove it."
            )
        if self.name == DPO and model.get("pretrained") is None:
            raise ConfigError(
                "objective.name=dpo needs model.pretrained, a folder of pretrained weights: they"
                " are the reference from which training starts."
            )
        if self.name != LANGUAGE_MODEL and (model.get("lora") or {}).get("r") is not None:
            raise ConfigError(
                f"objective.name={self.name} trains all weights. Remove model.lora.r, or use"
                f" objective.name={LANGUAGE_MODEL}."
            )

    @property
    def second_model(self) -> str | None:
        """Name of the frozen second model, an attribute of the module; None if there is none."""
        return {DPO: "reference", DISTILLATION: "teacher"}.get(self.name)

    @property
    def batch_keys(self) -> tuple[str, ...]:
        """Tensors of a batch, all (batch, sequence)."""
        return (
            ("input_ids", "labels", "rejected_ids", "rejected_labels")
            if self.name == DPO
            else ("input_ids", "labels")
        )

    def second_spec(self, model: ModelSpec, *, dry: bool) -> ModelSpec | None:
        """Read the sizes of the frozen second model; None without one.

        Args:
            model: sizes of the trained model.
            dry: whether no run is started: then the teacher may be named later, and its folder
                needs no weights.

        Raises:
            ConfigError: the teacher has another vocabulary size. CheckpointError: its configuration
                or, for a run, its weights cannot be read.
        """
        if self.name == DPO:
            return model
        if self.name != DISTILLATION or (dry and self.teacher == REQUIRED):
            return None
        fields = self.teacher_fields(model.vocab)
        assert fields is not None
        return (
            read_spec(fields)
            if dry
            else complete_model({"name": TAKEN, "pretrained": self.teacher})[1]
        )

    def teacher_fields(self, vocabulary: int) -> dict[str, Any] | None:
        """Read `model_type` and the fields of the teacher's configuration; None without a teacher.

        Args:
            vocabulary: vocabulary size of the model.

        Raises:
            ConfigError: its folder is not named yet, or it has another vocabulary size.
                CheckpointError: it cannot be read.
        """
        if self.name != DISTILLATION:
            return None
        if self.teacher == REQUIRED:
            raise ConfigError(_NO_TEACHER)
        assert self.teacher is not None
        fields = architecture(find_folder(self.teacher))
        require_same_vocabulary(
            f"={self.teacher}", fields.get("vocab_size", vocabulary), vocabulary
        )
        return fields


def require_same_vocabulary(name: str, found: int, wanted: int) -> None:
    """Refuse a teacher with another vocabulary size than the model.

    Args:
        name: the value of the key, with an equals sign in front; may be empty.

    Raises:
        ConfigError: with both sizes.
    """
    if found != wanted:
        raise ConfigError(
            f"objective.teacher{name} has a vocabulary of {found} tokens, but the model has"
            f" {wanted}. Use a teacher with the same tokenizer, or model.config.vocab_size={found}."
        )
