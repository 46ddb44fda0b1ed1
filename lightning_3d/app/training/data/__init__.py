"""Data modules that pack text into samples of equal length, and the names that `data/` config files
have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from os import PathLike
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from lightning_3d.errors import ConfigError, did_you_mean, listed

if TYPE_CHECKING:
    from lightning_3d.app.training.data.base import PackedDataModule

DATA_MODULES: dict[str, str] = {
    "python_stdlib": "lightning_3d.app.training.data.python_stdlib:PythonStdlib",
    "python_tokens": "lightning_3d.app.training.data.python_tokens:PythonTokens",
    "python_pairs": "lightning_3d.app.training.data.python_pairs:PythonPairs",
    "tokens": "lightning_3d.app.training.data.tokens:TokenFiles",
    "blend": "lightning_3d.app.training.data.blend:Blend",
    "huggingface": "lightning_3d.app.training.data.huggingface:HuggingFaceText",
    "instructions": "lightning_3d.app.training.data.instructions:Instructions",
}
"""Module and class for each `data.name`. Imported on demand."""


def make_data_module(config: Mapping[str, Any], **given: Any) -> PackedDataModule:
    """Build the data module that a `data/` config file describes.

    Args:
        config: `name`, one of `DATA_MODULES`, and the arguments of that data module; "???" marks a
            missing one, as in Hydra.
        **given: arguments from elsewhere in the configuration, such as `global_batch_size`,
            `vocab_size` and `seed`.

    Raises:
        ConfigError: the name is unknown, or an argument is missing, unknown, or given twice with
            different values.
        DataError: a path does not exist.
    """
    arguments = {str(key): None if value == "???" else value for key, value in config.items()}
    name = arguments.pop("name", None)
    if not isinstance(name, str) or name not in DATA_MODULES:
        raise ConfigError(
            f"data.name must be {listed(DATA_MODULES, last='or')}; got"
            f" {name!r}.{did_you_mean(str(name), DATA_MODULES)}"
        )
    for key, value in given.items():
        if arguments.get(key) is None:
            arguments[key] = value
        elif arguments[key] != value:
            other = {"vocab_size": "model.config.vocab_size"}.get(key, key)
            raise ConfigError(
                f"data.{key}={arguments[key]} contradicts {other}={value}. Remove data.{key}, or"
                " make them equal."
            )
    module_name, class_name = DATA_MODULES[name].split(":")
    data_module: Callable[..., PackedDataModule] = getattr(import_module(module_name), class_name)
    _check_arguments(data_module, arguments, f"data={name}")
    return data_module(**arguments)


def _check_arguments(data_module: Any, arguments: Mapping[str, Any], what: str) -> None:
    """Refuse unknown and missing arguments of a data module, and values of a wrong type."""
    known = _parameters(data_module)
    for key in arguments:
        if key not in known:
            raise ConfigError(
                f"{what} has no option '{key}'. Its options are"
                f" {listed(sorted(known))}.{did_you_mean(key, known)}"
            )
    missing = [
        f"data.{key}"
        for key, parameter in known.items()
        if parameter.default is Parameter.empty and arguments.get(key) is None
    ]
    if missing:
        raise ConfigError(
            f"{what} needs {listed(missing)}, for example {missing[0]}=... on the command line."
        )
    for key, value in arguments.items():
        if not _fits(value, known[key].annotation):
            raise ConfigError(
                f"data.{key} must be {_WORDS_OF_KINDS[_kinds(known[key].annotation)[0]]}; got"
                f" {value!r}."
            )


_WORDS_OF_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    dict: "a group of keys",
}


def _kinds(hint: Any) -> list[Any]:
    """Return the classes that an annotation names, without None."""
    hints = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return [get_origin(one) or one for one in hints if one is not NoneType]


def _fits(value: Any, hint: Any) -> bool:
    """Check a value against an annotation, where a whole number is a number, and true is
    neither."""
    if (
        value is None
        or not isinstance(value, bool)
        and isinstance(value, int)
        and float in _kinds(hint)
    ):
        return True
    return any(
        type(value) is kind or kind is PathLike and isinstance(value, PathLike)
        for kind in _kinds(hint)
    )


def _parameters(data_module: Any) -> dict[str, Parameter]:
    """Return the keyword arguments of a class, including those that it passes to its parents."""
    known: dict[str, Parameter] = {}
    for parent in data_module.__mro__:
        if "__init__" not in parent.__dict__:
            continue
        hints = get_type_hints(parent.__dict__["__init__"])
        parameters = signature(parent.__dict__["__init__"]).parameters.values()
        for parameter in parameters:
            if parameter.kind is Parameter.KEYWORD_ONLY:
                known.setdefault(
                    parameter.name, parameter.replace(annotation=hints[parameter.name])
                )
        if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
            break
    return known
