"""Which keys of a configuration may differ where a run resumes a checkpoint. Imports no torch.

A checkpoint has the configuration of the run that saved it. Every key takes effect in the resumed
run, except those that would make it another run (other data, another model, other states of the
optimizer): these are refused before ranks start. The table in docs/checkpoints.md says the same,
and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from lightning_3d.app.config.plan_run import RunPlan
from lightning_3d.app.config.stored_paths import absolute_paths
from lightning_3d.errors import ConfigError, listed
from lightning_3d.storage.checkpoint_names import saved_config, steps_of
from lightning_3d.storage.remote_path import place

Difference = tuple[str, Any, Any]
"""A key, its value before, and its value now; None for a value that is missing."""

SAME = ("model", "data", "optimizer", "objective", "seed")
"""Groups with keys that must not differ. Layout, machines and length may change, because
checkpoints do not depend on them."""

_FIXED = ("model.*", "data.*", "seed", "objective.name", "optimizer.adamw")
_FREE = (
    "model.name",
    "model.attn_implementation",
    "model.*_parameters",
    "model.mtp_loss_weight",
    "model.lora.dropout",
    "model.config.*dropout*",
    "model.config.*_pdrop",
    "data.num_workers",
    "data.val_path",
    "data.val_sequences",
    "data.cache_*",
    "data.check_hashes",
    "data.predict_across_documents",
    "data.document_mask",
    # The same data in another place: ranks compare the number of samples.
    "data.train_path",
    "data.path",
    "data.root",
    "data.sources.*",
    "data.tokenizer",
)
"""Exceptions from `_FIXED`."""

_KERNELS = ("fused", "foreach", "capturable")
_WITHOUT_STATES = (
    "lr",
    "adamw_lr",
    "weight_decay",
    "betas",
    "eps",
    "no_decay",
    "groups",
    "nesterov",
    "maximize",
    "scheduler",
    *_KERNELS,
)
"""Arguments of optimizers that decide about no state: they may be given, left out, or 0."""
_OF_THE_KIND = ("optimizer.name", "optimizer._target_")
_CLASSES = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}

_TOLD = ("model", "data", "optimizer", "objective", "precision", "trainer")
_UNTOLD = (
    "trainer.*resume",
    "trainer.dry",
    "trainer.restarts*",
    "trainer.start_method",
    "trainer.val_check_interval",
    "data.num_workers",
)
_MOST_SHOWN = 6


def differences(before: Any, now: Any, key: str = "") -> Iterator[Difference]:
    """Yield the keys in which two configurations differ. A key that only one has, and that is null
    or false there, is no difference."""
    if isinstance(before, Mapping) or isinstance(now, Mapping):
        old = before if isinstance(before, Mapping) else {}
        new = now if isinstance(now, Mapping) else {}
        for name in sorted({*old, *new}, key=str):
            yield from differences(
                old.get(name), new.get(name), f"{key}.{name}" if key else str(name)
            )
        return
    off = (None, False)
    both_off = any(before is value for value in off) and any(now is value for value in off)
    if _as_list(before) != _as_list(now) and not both_off:
        yield key, before, now


def refused_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """List the differences with which a checkpoint of `before` cannot be resumed. Groups that one
    of the two lacks are not compared."""
    before = absolute_paths(before)
    now = absolute_paths(now)
    groups = [group for group in SAME if group in before and group in now]
    found = [change for group in groups for change in differences(before[group], now[group], group)]
    refused = [change for change in found if _is_refused(*change)]
    if not any(
        ((config.get("model") or {}).get("lora") or {}).get("r") for config in (before, now)
    ):
        # options of adapters that there are not
        refused = [change for change in refused if not change[0].startswith("model.lora.")]
    if "optimizer" in groups:
        kinds = ("optimizer", _kind(before["optimizer"]), _kind(now["optimizer"]))
        return (
            [kinds] + [change for change in refused if change[0][:9] != "optimizer"]
            if kinds[1] != kinds[2]
            else refused
        )
    return refused


def describe(changes: list[Difference]) -> str:
    """Name keys with both values, the first few of many."""
    shown = [
        f"{key}={_shown(now)} (was {_shown(before)})" for key, before, now in changes[:_MOST_SHOWN]
    ]
    more = len(changes) - len(shown)
    return listed([*shown, f"{more} more"] if more > 0 else shown)


def groups_of(plan: RunPlan) -> dict[str, Any]:
    """Return the groups of a checked run that are compared."""
    run = plan.run
    own: dict[str, Any] = {
        "model": dict(plan.model),
        "data": run.data,
        "optimizer": run.optimizer,
        "seed": run.seed,
    }
    return own | {"objective": asdict(run.objective), "trainer": asdict(run.trainer)}


def require_resumable(checkpoint: str | None, config: Mapping[str, Any]) -> None:
    """Refuse to resume the checkpoint of another run. One that cannot be read, or has no
    configuration, is left to the ranks.

    Args:
        checkpoint: the checkpoint; None: there is none.
        config: the groups that are compared, and `trainer.max_steps`.

    Raises:
        ConfigError: keys differ that must not, or the checkpoint is behind the last step of this
            run.
    """
    if checkpoint is None:
        return
    before = saved_config(place(checkpoint))
    if before is None:
        return
    refused = refused_changes(before, config)
    if refused:
        raise ConfigError(
            f"The run that saved {checkpoint} cannot be resumed with {describe(refused)}. Leave"
            " these keys as they were, or start a new run from its weights: lightning-3d export"
            f" {checkpoint} --output WEIGHTS, then model=pretrained model.pretrained=WEIGHTS."
        )
    step, last = steps_of(place(checkpoint)), config["trainer"]["max_steps"]
    if step > last:
        raise ConfigError(
            f"trainer.max_steps={last} is before step {step} of {checkpoint}, so there is nothing"
            f" to train. Use at least {step} steps, or resume an earlier checkpoint."
        )


def changes_since(checkpoint: str, config: Mapping[str, Any]) -> str:
    """Name the changed keys that take effect in a run that resumes a checkpoint; empty if there are
    none."""
    before = absolute_paths(saved_config(place(checkpoint)) or {})
    config = absolute_paths(config)
    groups = [group for group in _TOLD if group in before and group in config]
    found = [
        change for group in groups for change in differences(before[group], config[group], group)
    ]
    return describe(
        [
            change
            for change in found
            if not any(fnmatchcase(change[0], pattern) for pattern in _UNTOLD)
        ]
    )


def _is_refused(key: str, before: Any, now: Any) -> bool:
    # the same model in another place; its weights are in the checkpoint
    if key == "model.pretrained":
        return not (before and now)
    if any(fnmatchcase(key, pattern) for pattern in _FIXED):
        return not any(fnmatchcase(key, pattern) for pattern in _FREE)
    group, argument, *_ = [*key.split("."), ""]
    if group != "optimizer" or argument in _WITHOUT_STATES or key in _OF_THE_KIND:
        return False
    # such as momentum=0 and amsgrad: the optimizer has other states
    return bool(before) != bool(now)


def _kind(optimizer: Mapping[str, Any]) -> Any:
    name = optimizer.get("name")
    return optimizer.get("_target_") or _CLASSES.get(str(name), name)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
