"""Changes of the Trainer's arguments in a run that is compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.ranks.role import ALONE, ALONE_WHOLE, Role
from lightning_3d.strategy.role_arguments import notes

MOST_RANKS = 16


class QuietLogger(DummyLogger):
    """Logger that writes nothing, with a folder for those who ask for one."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    def save_dir(self) -> str:
        return self._folder


def trainer_arguments(given: dict[str, Any], role: Role, layout: Layout | None) -> dict[str, Any]:
    """Return the Trainer's arguments in a run that is compared.

    Raises:
        ConfigError: the layout has more ranks than this machine should run.
    """
    ranks = layout.world_size if layout is not None else _devices(given)
    if ranks > MOST_RANKS:
        raise ConfigError(
            f"verify runs all ranks on this machine, at most {MOST_RANKS}; the script has {ranks}."
            " Verify a smaller layout with the same kinds of axes, for example tp2_pp2_dp2."
        )
    given_ranks = ranks if str(given.get("devices", "auto")) in ("auto", "-1") else _devices(given)
    on_gpus = (
        given.get("accelerator", "auto") in ("auto", "gpu", "cuda")
        and torch.cuda.device_count() >= ranks
    )
    written = str(role.own / "written")
    changed = given | {
        "accelerator": "gpu" if on_gpus else "cpu",
        "devices": given_ranks,  # the strategy refuses them where they are not those of the layout
        "num_nodes": 1,
        "max_steps": (
            role.steps if given.get("max_steps", -1) < 0 else min(role.steps, given["max_steps"])
        ),
        "default_root_dir": written,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "profiler": None,
        "callbacks": _callbacks(given.get("callbacks")),
    }
    if given.get("logger") is not False:
        changed["logger"] = QuietLogger(written)
    if given.get("limit_val_batches") != 0:
        changed["limit_val_batches"] = 1
    if str(given.get("precision") or "32-true").split("-")[0] not in ("32", "64"):
        notes.append(f"precision 32-true instead of {given['precision']}, which hides differences")
        changed["precision"] = "32-true"
    if "plugins" in given:
        changed["plugins"] = _plugins(given["plugins"])
    if role.is_plain or role.name in (ALONE, ALONE_WHOLE):
        changed["devices"] = 1
    if role.is_plain:
        changed["strategy"] = "auto"
    return changed


def _devices(given: Mapping[str, Any]) -> int:
    devices = given.get("devices", "auto")
    nodes = int(given.get("num_nodes", 1))
    if isinstance(devices, Iterable) and not isinstance(devices, str):
        return len(list(devices)) * nodes
    if str(devices).isdigit():
        return int(devices) * nodes
    return max(1, torch.cuda.device_count()) * nodes


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    # a list of Hydra's is neither a list nor a tuple
    return list(given) if isinstance(given, Iterable) else [given]


def _callbacks(given: Any) -> list[Any]:
    unwanted = (pl.callbacks.Checkpoint, pl.callbacks.ProgressBar, pl.callbacks.ModelSummary)
    return [callback for callback in _as_list(given) if not isinstance(callback, unwanted)]


def _plugins(given: Any) -> list[Any]:
    return [plugin for plugin in _as_list(given) if not isinstance(plugin, ClusterEnvironment)]
