"""A causal language model as an ordinary LightningModule."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from typing_extensions import override

from lightning_3d.app.config.lora import LoraOptions
from lightning_3d.app.config.multi_token import MultiTokenOptions
from lightning_3d.app.config.optimizer import check_optimizer
from lightning_3d.app.training.data.documents import IGNORE_INDEX
from lightning_3d.app.training.document_inputs import inputs_of
from lightning_3d.app.training.document_trial import require_separate_documents
from lightning_3d.app.training.optimizers import decay_of, make_optimizer, try_optimizer
from lightning_3d.app.training.parameter_groups import NamedGroup, find_groups
from lightning_3d.app.training.schedules import make_scheduler
from lightning_3d.compat.transformers_masks import give_positions_to_masks
from lightning_3d.errors import ConfigError, did_you_mean
from lightning_3d.models.multi_token import predict_ahead
from lightning_3d.models.pretrained_config import TAKEN, architecture, refuse_other_architecture
from lightning_3d.models.safetensors_folder import find_folder
from lightning_3d.weights.pretrained import load_pretrained

OLDER_FIELDS = (
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "torch_dtype",
    "_name_or_path",
    "auto_map",
    "output_attentions",
)
"""Fields that older versions of Transformers wrote into configurations, and that newer ones
translate or ignore."""


class CausalLM(LightningModule):
    """LightningModule that trains a Transformers causal LM on batches of `input_ids` and `labels`,
    both (batch, sequence), and of `position_ids` of that shape where the data module has a document
    mask.

    The model is built from its configuration, with new or pretrained weights. Pretrained weights
    may be frozen and trained through LoRA adapters. Logs `loss` every step and `val_loss` per
    validation, both in nats per target token. If the data module names its validation sets
    (`val_names`), it logs `val_loss/NAME` for each, and `val_loss` is their mean with the weights
    of `validation_weights()`. With multi-token prediction, it also logs the two parts of `loss`:
    `cross_entropy`, which is that of the model itself, as `val_loss` is, and `mtp_loss`, the mean
    of the losses of the modules behind it.

    Args:
        model: a `model/` config file: `config` holds `model_type` and the fields of the
            Transformers configuration; `attn_implementation`, `pretrained` (a folder, see
            `load_pretrained`), `lora` (see `LoraOptions`), `mtp_layers` and `mtp_loss_weight` (see
            `MultiTokenOptions`) are optional. Other entries are stored, but not used.
        optimizer: an `optimizer/` config file; None for a module that is only evaluated. Without
            `no_decay`, it is that of all these files.

    Raises:
        ConfigError: Transformers does not know the model type, the optimizer's options are invalid,
            or the pretrained weights have another architecture. `configure_model`: the model does
            not keep documents apart, and the data module asks for it.
    """

    def __init__(
        self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        model, optimizer = _plain(model), _plain(optimizer)
        if optimizer is not None:
            check_optimizer(optimizer)
            try_optimizer(optimizer)
        self.save_hyperparameters({"model": model, "optimizer": optimizer})
        self.model_config = model
        self.optimizer_config = optimizer
        folder = find_folder(model["pretrained"]) if model.get("pretrained") is not None else None
        stored = architecture(folder) if folder is not None else {}
        self.config = transformers_config(model["config"], known=stored)
        self.lora = LoraOptions.of(model)
        self.ahead = MultiTokenOptions.of(model)
        self.loss_parts = () if self.ahead.layers is None else ("cross_entropy", "mtp_loss")
        if folder is not None and model.get("name") != TAKEN:
            there = transformers_config(stored, known=stored)
            refuse_other_architecture(
                self.config.to_dict(), there.to_dict(), str(model.get("name")), folder
            )
        self.model: Any = None
        self.parameter_count = 0
        self._groups: list[NamedGroup] = []

    @override
    def configure_model(self) -> None:
        if self.model is not None:
            return
        attention = self.model_config.get("attn_implementation")
        try:
            self.model = AutoModelForCausalLM.from_config(
                self.config, attn_implementation=attention
            )
        except (ImportError, ValueError) as error:
            # its package is not installed, or there is none of this name
            if isinstance(error, ValueError) and "attn_implementation" not in str(error):
                raise
            works = (
                "eager" if attention == "sdpa" else "sdpa (or eager, for a model that has no sdpa)"
            )
            raise ConfigError(
                f"model.attn_implementation={attention} cannot be used here:"
                f" {' '.join(str(error).split())} Use model.attn_implementation={works}, which"
                " needs no package."
            ) from error
        self._keep_documents_apart(self.model)
        if self.ahead.layers is not None:
            predict_ahead(self.model, self.ahead.layers)
        if self.model_config.get("pretrained") is not None:
            load_pretrained(self.model, self.model_config["pretrained"])
        if self.lora.r is not None:
            self.model = with_adapters(self.model, self.lora)
        # Counted here, on the whole model: a strategy may leave only a shard of it on this rank.
        self.parameter_count = sum(parameter.numel() for parameter in self.model.parameters())
        self.group_parameters()

    def frozen_model(self, config: Any, folder: Any) -> PreTrainedModel:
        """Build a second model that is not trained, a teacher or a reference, with the attention of
        this one and pretrained weights.

        Args:
            config: its Transformers configuration.
            folder: folder of its weights; None: new ones, made from the seed.

        Raises:
            ConfigError: the model does not keep documents apart, and the data module asks for it.
        """
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=self.model_config.get("attn_implementation")
        )
        self._keep_documents_apart(model)
        if folder is not None:
            load_pretrained(model, folder)
        return model.requires_grad_(False).eval()

    def _keep_documents_apart(self, model: PreTrainedModel) -> None:
        """Let a model keep documents apart if the data module of the trainer, if there is one,
        gives positions for it.

        Raises:
            ConfigError: the model cannot.
        """
        try:
            data: Any = getattr(self.trainer, "datamodule", None)
        except RuntimeError:  # there is no trainer
            return
        if getattr(data, "document_mask", False):
            give_positions_to_masks(model)
            require_separate_documents(model)

    def group_parameters(self) -> None:
        """Divide the trained parameters of the whole model into the optimizer's groups, at the end
        of `configure_model`.

        A subclass that adds or unfreezes parameters after `super().configure_model()` must call it
        again: later, a rank may have only a shard of the model.

        Raises:
            ConfigError: see `find_groups`.
        """
        if self.optimizer_config is not None:
            self._groups = find_groups(
                self.model, self.optimizer_config, decay_of(self.optimizer_config)
            )

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.ahead.layers is None:
            loss = self._loss(batch)
        else:
            output = self.model(**inputs_of(batch, self.model), labels=batch["labels"])
            loss = output.loss + self.ahead.loss_weight * output.mtp_loss
            for name, part in zip(self.loss_parts, (output.loss, output.mtp_loss), strict=True):
                self.log(name, part)
        self.log("loss", loss)
        return loss

    @override
    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """Log the loss of a batch. Returns it with the number of its target tokens and of its
        samples."""
        names = getattr(getattr(self.trainer, "datamodule", None), "val_names", ())
        name = f"val_loss/{names[dataloader_idx]}" if names else "val_loss"
        loss = self._loss(batch)
        self.log(name, loss, sync_dist=True, add_dataloader_idx=False)
        labels = batch["labels"]
        # Whole numbers, so that the strategy adds them up over micro-batches.
        return {
            "loss": loss,
            "tokens": (labels[:, 1:] != IGNORE_INDEX).sum(),
            "samples": torch.tensor(len(labels)),
        }

    @override
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        """Score the targets of each row, or compute the logits after its last token.

        Args:
            batch: `input_ids`, (rows, sequence), and either `targets`, (rows, sequence), the token
                that each position predicts (-100: not counted), or `last`, (rows,), the place of
                the last token of each row. What follows these places is padding, which causal
                attention never sees.

        Returns:
            (rows, 2) of float64 for targets, see `score_rows`; (rows, vocabulary) for `last`.
        """
        logits: Any = self.model(input_ids=batch["input_ids"]).logits
        if "targets" in batch:
            return score_rows(logits, batch["targets"])
        last = batch["last"]
        return logits[torch.arange(len(last), device=last.device), last]

    @override
    def on_validation_epoch_end(self) -> None:
        """Log the mean of the losses of several validation sets."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if getattr(data, "val_names", ()):
            losses = {
                name: self.trainer.callback_metrics[f"val_loss/{name}"] for name in data.val_names
            }
            self.log(
                "val_loss",
                sum(weight * losses[name] for name, weight in data.validation_weights().items()),
                sync_dist=True,
            )

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.model is not None, "configure_model comes first"
        return self.model(**inputs_of(batch, self.model), labels=batch["labels"]).loss

    @override
    def configure_optimizers(self) -> Any:
        assert self.model is not None, "configure_model comes first"
        if self.optimizer_config is None:
            raise ConfigError(
                "CausalLM was built without an optimizer, so it cannot be trained. Pass optimizer=."
            )
        trainable = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        optimizer = make_optimizer(
            self.optimizer_config, trainable, self._groups, self._optimizer_device()
        )
        schedule = self.optimizer_config.get("scheduler")
        if schedule is None:
            return optimizer
        scheduler = make_scheduler(optimizer, schedule, self.trainer.estimated_stepping_batches)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _optimizer_device(self) -> torch.device | None:
        """Return the device on which the optimizer steps; None if the strategy does not say it, or
        without a Trainer."""
        try:
            trainer: Any = self.trainer
        except RuntimeError:  # it has none
            return None
        return getattr(getattr(trainer, "strategy", None), "optimizer_device", None)


def with_adapters(model: PreTrainedModel, options: LoraOptions) -> Any:
    """Add PEFT's LoRA adapters to the model and freeze everything else.

    Raises:
        ConfigError: no layer has one of these names.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    names = (
        options.target_modules
        if isinstance(options.target_modules, str)
        else list(options.target_modules)
    )
    lora = LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=names,
        task_type=TaskType.CAUSAL_LM,
    )
    try:
        return get_peft_model(model, lora)
    except ValueError as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"PEFT cannot add adapters to the layers model.lora.target_modules={names}: {said}."
            " Name layers of this model, or use model.lora.target_modules=all-linear."
        ) from error


def transformers_config(fields: Mapping[str, Any], known: Iterable[str] = ()) -> Any:
    """Build a Transformers configuration from its `model_type` and fields.

    Args:
        fields: `model_type` and the fields of the configuration.
        known: names of fields to accept even if the model does not read them, such as those of a
            pretrained model's folder.

    Raises:
        ConfigError: Transformers does not know the model type or a field, or refuses a value.
    """
    fields = dict(fields)
    model_type = fields.pop("model_type", None)
    # Training needs no cache of keys and values. With one, Transformers does not keep the documents
    # of a sample apart.
    fields["use_cache"] = False
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        if model_type not in CONFIG_MAPPING:
            near = (
                did_you_mean(str(model_type), CONFIG_MAPPING)
                or " Use another model_type, or a newer version of Transformers."
            )
            raise ConfigError(
                f"Transformers {transformers.__version__} has no model_type {model_type!r}.{near}"
            ) from error
        said = " ".join(str(error).split())
        raise ConfigError(
            f"Transformers cannot build a configuration of model_type {model_type!r} from"
            f" model.config: {said.rstrip('.')}. Correct these values in model.config."
        ) from error
    declared = _declared_fields(type(config))
    read = _words_of_the_code(type(config))
    for name in fields:
        # Transformers would keep it and never read it
        if name not in {*declared, *known, *OLDER_FIELDS} and name not in read:
            raise ConfigError(
                f"model.config has no field {name!r} for model_type"
                f" {model_type!r}.{did_you_mean(name, declared)}"
            )
    return config


def _words_of_the_code(kind: Any) -> set[str]:
    """Collect the words of a family's modeling file: some read fields that the configuration does
    not declare (Qwen3-MoE's `head_dim`)."""
    module = importlib.util.find_spec(kind.__module__.replace(".configuration_", ".modeling_"))
    return (
        set(re.findall(r"\w+", Path(module.origin).read_text("utf-8")))
        if module is not None and module.origin
        else set()
    )


def _declared_fields(kind: Any) -> set[str]:
    """Fields of a configuration class; newer versions of Transformers make them dataclasses."""
    names = {field.name for field in dataclass_fields(kind)} if is_dataclass(kind) else set()
    if not names:
        for parent in kind.__mro__:
            names |= (
                set(signature(parent.__dict__["__init__"]).parameters)
                if "__init__" in parent.__dict__
                else set()
            )
    return names | set(kind.attribute_map)


def _plain(value: Any) -> Any:
    """Convert mappings and sequences to plain dicts and lists: checkpoints must not contain classes
    of Hydra."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


# Scores of rows of tokens, from the logits of a causal language model.


def score_rows(logits: Tensor, targets: Tensor) -> Tensor:
    """Score rows of tokens. The log-softmax is computed in float32 or wider.

    Args:
        logits: (rows, sequence, vocabulary).
        targets: (rows, sequence).

    Returns:
        (rows, 2) of float64: the log-probability of the targets, and 1.0 where each of them is the
            most probable token.
    """
    counted = targets != IGNORE_INDEX
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = scores.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = torch.where(counted, chosen.double(), 0.0).sum(-1)
    greedy = ((scores.argmax(-1) == targets) | ~counted).all(-1)
    return torch.stack([total, greedy.double()], -1)
