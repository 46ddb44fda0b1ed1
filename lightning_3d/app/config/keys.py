"""Keys and values of a configuration: the known ones, and messages about wrong ones. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from lightning_3d.app.config.files import conf_folder
from lightning_3d.errors import ConfigError, did_you_mean, listed


def data_options(name: object) -> dict[str, Any]:
    """Return the options of a data module with their defaults, from its configuration file. Empty
    when there is no file."""
    file = next((one for one in (conf_folder() / "data").glob("*.yaml") if one.stem == name), None)
    if file is None:
        return {}
    options = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(options, dict)
    return {str(key): default for key, default in options.items()}


def check_type(key: str, value: Any, default: Any) -> None:
    """Refuse a value whose type differs from the default's. Null passes; if the default is null or
    missing, every value passes.

    Raises:
        ConfigError: with the key, the value and the default.
    """
    if value is None or default is None or default == "???":
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = number if isinstance(default, float) else type(value) is type(default)
    if not fits:
        kinds = {bool: "true or false", int: "a whole number", float: "a number"}
        raise ConfigError(
            f"{key} must be {kinds.get(type(default), 'a string')}, for example"
            f" {str(default).lower()}; got {value!r}."
        )


_LEAST = {
    "num_workers": (0, "at least 0 (0 reads in the rank itself)"),
    "val_sequences": (1, "at least 1, or null for the whole split"),
}


def check_data_counts(data: Mapping[str, Any]) -> None:
    """Refuse counts that are too small. Other types than whole numbers are refused with all keys.

    Raises:
        ConfigError: with the key and what works.
    """
    for key, (least, wanted) in _LEAST.items():
        value = data.get(key)
        if isinstance(value, int) and value < least:
            raise ConfigError(f"data.{key} must be {wanted}; got {value}.")


def check_containers(values: Any, prefix: str = "") -> None:
    """Refuse a value in the place of a group or a list. OmegaConf checks this, except where an
    interpolation has the value.

    Args:
        values: dataclass with checked values.
        prefix: its full name with a dot.

    Raises:
        ConfigError: with the key and the value.
    """
    for key, hint in get_type_hints(type(values)).items():
        value = getattr(values, key)
        kinds = [
            get_origin(kind) or kind
            for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,))
        ]
        groups = [kind for kind in kinds if kind is dict or is_dataclass(kind)]
        if (groups or list in kinds) and not isinstance(value, tuple(kinds)):
            what = f"a group of keys, as in {prefix}{key}.KEY=..." if groups else "a list"
            raise ConfigError(f"{prefix}{key} must be {what}; got {value!r}.")
        if is_dataclass(value):
            check_containers(value, f"{prefix}{key}.")


def check_group_keys(group: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse an unknown key of a group. Check nothing if no keys are known.

    Raises:
        ConfigError: with the key and the nearest known one.
    """
    for key in values if known else ():
        if key not in known:
            raise ConfigError(unknown_key(f"{group}.{key}", known))


_INSTEAD_OF_NULL = {
    "trainer.val_check_interval": (
        " To turn validation off, set trainer.limit_val_batches=0. By default a run validates once,"
        " at its end."
    ),
}

_OTHER_NAMES = {
    **dict.fromkeys(
        ("eval_every", "eval_interval", "eval_steps", "eval_every_n_steps"), "evaluate_every"
    ),
    **dict.fromkeys(
        ("save_every", "save_interval", "save_steps", "checkpoint_every"),
        "checkpoint_every_n_steps",
    ),
    **dict.fromkeys(("train_iters", "train_steps", "total_steps", "steps"), "max_steps"),
    **dict.fromkeys(("clip_grad", "max_grad_norm", "grad_clip"), "gradient_clip_val"),
    **dict.fromkeys(("log_every", "log_interval", "logging_steps"), "log_every_n_steps"),
    **dict.fromkeys(("ema", "ema_decay"), "average_decay"),
    **dict.fromkeys(("resume_from", "resume_from_checkpoint", "load", "ckpt_path"), "resume"),
}
"""Names of Megatron-LM, Transformers and others -> the key that does it here."""


def explain_value(error: OmegaConfBaseException) -> ConfigError:
    """Explain what is wrong with a key or a value, without OmegaConf's vocabulary."""
    key = str(error.full_key or error.key or "")
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        parent = error.parent_node
        return ConfigError(
            unknown_key(
                key, [str(name) for name in parent] if isinstance(parent, DictConfig) else ()
            )
        )
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{key} must be given, for example {key}=... on the command line.")
    text = str(error.msg or error).strip().splitlines()[0].rstrip(".")
    if "'None'" in text and isinstance(error, ValidationError):
        return ConfigError(f"{key} must not be null.{_INSTEAD_OF_NULL.get(key, '')}")
    return ConfigError(f"{key}: {text}." if key else text)


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Return the message for an unknown key.

    Args:
        key: full name of the key.
        known: keys that exist next to it.
    """
    group, _, name = key.rpartition(".")
    known = [other for other in known if not other.startswith("_")]  # Hydra's own, such as _target_
    here = _OTHER_NAMES.get(name)
    near = f' Here it is "{here}".' if here in known else did_you_mean(name, known)
    if group:
        near = near.replace('"', f'"{group}.', 1)
    where = f"{group} has" if group else "A run has"
    return f'There is no configuration key "{key}".{near}' + (
        f" {where} {listed(sorted(known))}." if known else ""
    )
