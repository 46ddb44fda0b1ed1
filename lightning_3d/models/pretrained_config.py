"""Checks of `model.pretrained=PATH` before a run starts. Reads only JSON: no torch, no
Transformers.

`model=pretrained` takes the whole architecture from the folder. A named model (`model=llama3_1_8b`)
must be the one in the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_3d.errors import CheckpointError, ConfigError, listed, plural
from lightning_3d.models.families import read_spec
from lightning_3d.models.safetensors_folder import (
    StoredTensor,
    find_folder,
    read_config,
    read_tensors,
)
from lightning_3d.models.spec import ModelSpec

TAKEN = "pretrained"
"""Name of the model that takes its architecture from the folder."""

REQUIRED = "required"
"""Placeholder for the folder in a recipe for fine-tuning. (OmegaConf's `???` does not replace a
value.)"""

# Fields of `config.json` that are not part of the architecture: its origin, and settings that a run
# decides.
_NOT_ARCHITECTURE = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)

# Fields that change what a model computes without changing the shapes of its weights.
_COMPUTED_WITH = (
    "model_type",
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "layer_norm_eps",
    "layer_types",
    "mlp_bias",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_key_value_heads",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "rotary_pct",
    "tie_word_embeddings",
    "use_parallel_residual",
    "vocab_size",
)


def complete_model(
    model: Mapping[str, Any], *, dry: bool = False
) -> tuple[dict[str, Any], ModelSpec]:
    """Complete the group `model` from the pretrained folder that it names, if any, and read the
    sizes of the model.

    Args:
        dry: whether no run is started. If True, `REQUIRED` is accepted in place of a folder, which
            the user can name later.

    Returns:
        (the group with the folder's full path, and with the folder's architecture where it takes
        that from there; sizes of the model)

    Raises:
        CheckpointError: the folder is missing, incomplete or damaged, or has no readable weights.
        ConfigError: no fields of a Transformers configuration, an invalid size, or another
            architecture than the folder's.
    """
    path, name, config, ahead = (
        model.get(key) for key in ("pretrained", "name", "config", "mtp_layers")
    )
    if path == REQUIRED and not dry:
        raise ConfigError("No folder of pretrained weights is given. Set model.pretrained=PATH.")
    if path in (None, REQUIRED):
        if name == TAKEN:
            raise ConfigError(
                "model=pretrained reads the architecture from a folder in Transformers' format. Set"
                " model.pretrained=PATH."
            )
        return {**model, "pretrained": None}, read_spec(_fields(config), ahead)
    folder = find_folder(str(path))
    stored = architecture(folder)
    tensors = read_tensors(folder)
    config = {**stored, **(config or {})} if name == TAKEN else _fields(config)
    spec = read_spec(config, ahead)
    if name != TAKEN:
        _require_same(config, spec, stored, str(name), folder)
    _require_ahead(spec, tensors, folder)
    _require_stored_shapes(spec, tensors, folder)
    return {**model, "config": config, "pretrained": str(folder)}, spec


def _fields(config: Any) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise ConfigError(
            "model.config must hold the fields of a Transformers configuration, with its"
            " model_type."
        )
    return config


def architecture(folder: Path) -> dict[str, Any]:
    """Read the fields of a folder's `config.json` that define the model.

    Raises:
        CheckpointError: no such file, quantized weights, or more than a text model.
    """
    config = read_config(folder)
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise CheckpointError(
            f"The weights in {folder} are quantized ({method}). Use the model's weights in bf16 or"
            " fp32."
        )
    if isinstance(config.get("text_config"), dict) and "hidden_size" not in config:
        raise CheckpointError(
            f"{folder} contains a {config.get('model_type')}, which is more than a text model:"
            " text_config describes only one part. Save the text model separately with"
            " Transformers, and use that folder."
        )
    return {key: value for key, value in config.items() if key not in _NOT_ARCHITECTURE}


def differences(config: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """List fields in which two configurations of one model disagree, as `field is 4 (8 in the
    folder)`. Ignore fields that one lacks."""
    pairs = {
        key: (config[key], stored[key])
        for key in _COMPUTED_WITH
        if config.get(key) is not None and stored.get(key) is not None
    }
    ropes = _rope(config), _rope(stored)
    if _is_extension(ropes[0], ropes[1], stored):
        ropes = {}, {}
    pairs |= {f"rope {key}": (ropes[0][key], ropes[1].get(key)) for key in ropes[0] if all(ropes)}
    return [
        f"{key} is {ours} ({theirs} in the folder)"
        for key, (ours, theirs) in pairs.items()
        if ours != theirs
    ]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotary positions with the names of Transformers 5; earlier versions have
    `rope_theta` and `rope_scaling`."""
    rope = {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or {}),
        **(config.get("rope_parameters") or {}),
    }
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    known = {
        key: value
        for key, value in rope.items()
        if value is not None and not isinstance(value, Mapping)
    }
    return known if "rope_theta" in known else {}


def _is_extension(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], stored: Mapping[str, Any]
) -> bool:
    """Check whether our positions extend those of the stored weights by YaRN (arXiv:2309.00071):
    they have the same base, and the original length is one that the weights know. Then the weights
    are meant to be trained on with other frequencies."""
    known, original = (
        stored.get("max_position_embeddings"),
        ours.get("original_max_position_embeddings"),
    )
    extends = (
        ours.get("rope_type") == "yarn"
        and theirs.get("rope_type") != "yarn"
        and ours.get("rope_theta") == theirs.get("rope_theta")
    )
    return extends and isinstance(known, int) and isinstance(original, int) and original <= known


def refuse_other_architecture(
    config: Mapping[str, Any], stored: Mapping[str, Any], name: str, folder: Path
) -> None:
    """Refuse a model that computes something else than the one whose weights are in the folder.

    Raises:
        ConfigError: with the fields that differ.
    """
    found = differences(config, stored)
    if found:
        raise ConfigError(
            f"The weights in {folder} are not those of model={name}: {listed(found[:4])}. Take the"
            f" architecture from the folder: model={TAKEN}; fields of model.config override it."
        )


def _require_same(
    config: Mapping[str, Any], spec: ModelSpec, stored: Mapping[str, Any], name: str, folder: Path
) -> None:
    """Refuse a model with other shapes than the folder's, or one that computes something else."""
    if config.get("model_type") == stored.get("model_type"):
        stored_spec = read_spec(stored, spec.ahead)
        here, there = spec.shapes or {}, stored_spec.shapes or {}
        both = [key for key in here if key in there]
        other = [
            f"{key} has shape {list(here[key])} ({list(there[key])} in the folder)"
            for key in both
            if here[key] != there[key]
        ]
        if here and there:
            other += [f"{key} is only in the folder" for key in there if key not in here]
            other += [f"{key} is not in the folder" for key in here if key not in there]
        if other:
            raise ConfigError(
                f"The weights in {folder} are not those of model={name}."
                f" {plural(len(other), 'parameter')} differ{'s' * (len(other) == 1)}:"
                f" {'; '.join(other[:3])}. Take the architecture from the folder: model={TAKEN}."
            )
        if here and spec.windows != stored_spec.windows:
            raise ConfigError(
                f"The weights in {folder} are not those of model={name}: attention windows"
                " (sliding_window, layer_types) differ. Take the architecture from the folder:"
                f" model={TAKEN}."
            )
    refuse_other_architecture(config, stored, name, folder)


def _require_ahead(spec: ModelSpec, tensors: Mapping[str, StoredTensor], folder: Path) -> None:
    """Refuse modules of multi-token prediction that the folder does not have."""
    missing = [
        name for name in spec.shapes or () if name.endswith(".enorm.weight") and name not in tensors
    ]
    if missing:
        stored = spec.ahead - len(missing)
        raise ConfigError(
            f"{folder} has the weights of {stored} modules of multi-token prediction, but"
            f" model.mtp_layers={spec.ahead}: there is no {missing[0]}. Use"
            f" model.mtp_layers={stored or 'null'}."
        )


def _require_stored_shapes(
    spec: ModelSpec, tensors: Mapping[str, StoredTensor], folder: Path
) -> None:
    """Refuse files in which tensors with the model's names have other shapes than the configuration
    says."""
    shapes = spec.shapes or {}
    refuse_shapes(
        {key: (shape, tensors[key].shape) for key, shape in shapes.items() if key in tensors},
        folder,
    )


def refuse_shapes(
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], folder: Path
) -> None:
    """Refuse parameters whose shape is not the stored one.

    Args:
        shapes: (shape in the model, stored shape) by name.
        folder: folder of the stored tensors.

    Raises:
        ConfigError: with the first parameters that differ, and both shapes.
    """
    other = [
        f"{name} {list(ours)}, stored {list(theirs)}"
        for name, (ours, theirs) in shapes.items()
        if ours != theirs
    ]
    if other:
        raise ConfigError(
            f"{plural(len(other), 'parameter')} of the model"
            f" {'differs' if len(other) == 1 else 'differ'} in shape from those stored in {folder}:"
            f" {'; '.join(other[:3])}. Use the folder's configuration for the model."
        )
