"""Objects that a configuration names: the strategy, callbacks, loggers and arguments of the
Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from hydra.utils import get_object, instantiate
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.profilers import Profiler

from lightning_3d.app.config.scheduler import HYDRA_KEYS
from lightning_3d.app.config.targets import ARGUMENTS, check_targets, is_allowed, targets_of
from lightning_3d.errors import ConfigError, Lightning3DError, did_you_mean
from lightning_3d.strategy.strategy import Lightning3DStrategy

_KINDS: dict[str, tuple[type, ...]] = {
    "parallelism": (Lightning3DStrategy,),
    "callbacks": (Callback,),
    "logger": (Logger,),
}
_OF_HYDRA = (*HYDRA_KEYS, "_args_")
_OF_THE_TRAINER = (
    Callback,
    Logger,
    Profiler,
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    LayerSync,
    Precision,
)


def make_objects(group: str, entries: Mapping[str, Any]) -> list[Any]:
    """Build the objects of a group whose entries name classes; entries that are null are left out.

    Raises:
        ConfigError: see `make_object`.
    """
    return [
        make_object(f"{group}.{name}", entry)
        for name, entry in entries.items()
        if entry is not None
    ]


def make_object(key: str, entry: Mapping[str, Any]) -> Any:
    """Build the object that an entry with a `_target_` describes.

    Raises:
        Lightning3DError: see `_check_classes`; or the class does not accept these arguments, or
            raises an error of its own.
    """
    _check_classes(key, entry)
    try:
        return instantiate(entry)
    except Exception as error:
        if isinstance(error.__cause__, Lightning3DError):
            raise error.__cause__ from None
        raise _cannot_create(key, entry["_target_"], error.__cause__ or error) from error


def check_object(key: str, entry: Mapping[str, Any]) -> None:
    """Refuse an entry that `make_object` would refuse for its class or the names of its arguments,
    without building anything.

    Raises:
        ConfigError: see `_check_classes`; or the class does not accept these arguments.
    """
    _check_classes(key, entry)
    name = entry["_target_"]
    try:
        accepted = signature(get_object(name))
    except (TypeError, ValueError):  # of a class written in C
        return
    except Exception as error:
        raise _cannot_create(key, name, error.__cause__ or error) from error
    given = {str(word): value for word, value in entry.items() if word not in _OF_HYDRA}
    try:
        accepted.bind(*entry.get("_args_", ()), **given)
    except TypeError as error:
        unknown = next((word for word in given if word not in accepted.parameters), "")
        raise _cannot_create(
            key, name, error, did_you_mean(unknown, accepted.parameters) if unknown else ""
        ) from error


def _check_classes(key: str, entry: Mapping[str, Any]) -> None:
    """Check the names of classes in an entry, at any depth.

    Raises:
        ConfigError: a class may not be named there (`config.targets`), or does not exist.
    """
    _refuse_interpolations(key, entry)
    check_targets({key: entry})
    kinds = _KINDS.get(key.partition(".")[0], _OF_THE_TRAINER)
    for place, name in targets_of(entry, key):
        own = place == f"{key}._target_"
        _require_class(
            place, name, kinds if own else _OF_THE_TRAINER, known=() if own else ARGUMENTS
        )


def _refuse_interpolations(key: str, value: Any) -> None:
    """Refuse a value that would be resolved once more when the object is made: it could become a
    `_target_` that was never checked."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            _refuse_interpolations(f"{key}.{name}", below)
    elif isinstance(value, (list, tuple)):
        for index, below in enumerate(value):
            _refuse_interpolations(f"{key}[{index}]", below)
    elif isinstance(value, str) and "${" in value:
        raise ConfigError(
            f"{key} must not contain an escaped interpolation (\\${{...}}); got {value!r}. Write"
            " the value itself."
        )


def strategy_class(name: str) -> type[Lightning3DStrategy]:
    """Return the strategy that `parallelism._target_` names.

    Raises:
        ConfigError: the name is not one of a strategy, or may not be used.
    """
    check_targets({"parallelism": {"_target_": name}})
    _require_class("parallelism._target_", name, _KINDS["parallelism"])
    found: type[Lightning3DStrategy] = get_object(name)
    return found


def find_class(key: str, name: str, kinds: tuple[type, ...]) -> Any:
    """Return the class that `_target_` of `key` names, or a function that the user has allowed in
    its place.

    Raises:
        ConfigError: the name is not one of a class of these kinds, or may not be used.
    """
    check_targets({key: {"_target_": name}})
    _require_class(key, name, kinds)
    try:
        return get_object(name)
    except Exception as error:
        raise _cannot_create(key, name, error.__cause__ or error) from error


def _require_class(
    key: str, name: str, kinds: tuple[type, ...], known: tuple[str, ...] = ()
) -> None:
    """Refuse a name that is no class of these kinds, before it is called: a package has functions
    that run anything.

    What the user has allowed may be a function that makes such an object.
    """
    strategy = kinds == _KINDS["parallelism"]
    if name in known or (is_allowed(name) and not strategy):
        return
    try:
        found = get_object(name)
    except Exception as error:
        raise _cannot_create(
            key.removesuffix("._target_"), name, error.__cause__ or error, _nearest(name, kinds)
        ) from error
    if strategy and not (isinstance(found, type) and issubclass(found, Lightning3DStrategy)):
        raise ConfigError(
            f"parallelism._target_ must be Lightning3DStrategy or a subclass of it; got {name}."
        )
    if not (isinstance(found, type) and issubclass(found, kinds)):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{key} must name a class that is a {wanted}; got {name}.")


def _nearest(name: str, kinds: tuple[type, ...]) -> str:
    """Propose the class of these kinds in the module of `name` that is nearest to it; empty if
    there is none."""
    module, _, last = name.rpartition(".")
    try:
        found = vars(get_object(module))
    except Exception:  # the module is wrong as well
        return ""
    return did_you_mean(
        last,
        [
            word
            for word, value in found.items()
            if isinstance(value, type) and issubclass(value, kinds)
        ],
    )


def _cannot_create(key: str, name: str, error: BaseException, hint: str = "") -> ConfigError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"Cannot create {key} ({name}): {reason.rstrip('.') + '.' + hint if hint else reason}"
    )
