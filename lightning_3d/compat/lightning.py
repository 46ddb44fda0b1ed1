"""Private APIs of Lightning's loops, logging and `ModelCheckpoint`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning_3d.storage.checkpoint_names import SAVING, aside, checkpoints_in


def run_after_closure(precision_plugin: Any, module: Any, optimizer: Any) -> None:
    """Run Lightning's hooks and clipping between backward and optimizer step.

    `Precision._after_closure` (Lightning 2.6) calls `on_before_optimizer_step` and
    `configure_gradient_clipping`. Lightning's own `Precision.optimizer_step` runs it inside
    `optimizer.step(closure)`; ours steps a backend instead of the optimizer.
    """
    precision_plugin._after_closure(module, optimizer)


def is_logging(frame: Any) -> bool:
    """Whether a frame is that of `LightningModule.log` where it copies a value
    (`LightningModule.__to_tensor`, Lightning 2.6)."""
    return bool(frame.f_code.co_name == "__to_tensor")


@contextmanager
def replacing_grad_norm(replacement: Callable[..., dict[str, Any]]) -> Iterator[None]:
    """Let `replacement` compute `lightning.pytorch.utilities.grad_norm`, however the user has
    imported it (Lightning 2.6).

    Args:
        replacement: gets Lightning's own function before the arguments.
    """
    from types import FunctionType

    from lightning.pytorch.utilities import grad_norm

    def replaced(module: Any, norm_type: Any, group_separator: str = "/") -> dict[str, Any]:
        # those of Lightning's function
        return globals()["_grad_norms"][-1](module, norm_type, group_separator)

    code, scope = grad_norm.__code__, grad_norm.__globals__
    original = FunctionType(code, scope, argdefs=grad_norm.__defaults__)
    scope.setdefault("_grad_norms", []).append(partial(replacement, original))
    grad_norm.__code__ = replaced.__code__
    try:
        yield
    finally:
        grad_norm.__code__ = code
        scope["_grad_norms"].pop()


@contextmanager
def logging_in_training_step(module: Any) -> Iterator[None]:
    """Let `module.log` in another hook log as `training_step` does, whose name decides what is
    shown when and what is reset.

    `LightningModule._current_fx_name` (Lightning 2.6) is set before each hook and has no public
    form.
    """
    before = module._current_fx_name
    module._current_fx_name = "training_step"
    try:
        yield
    finally:
        module._current_fx_name = before


def logged_entry(module: Any, name: str) -> Any:
    """What Lightning keeps of a name that the hook that runs has logged, a torchmetrics object;
    None where it keeps nothing of this epoch.

    `Trainer._results` (Lightning 2.6) maps "hook.name" to a `_ResultMetric`; there is no public
    form. It adds up values and weights, and takes weights (`batch_size`) that are tensors on the
    device as it takes whole numbers, though `LightningModule.log` does not say so.
    """
    entry = module.trainer._results.get(f"{module._current_fx_name}.{name}")
    return None if entry is None or entry.has_reset else entry


def has_outputs(closure: Any) -> bool:
    """Return whether `complete_outputs` works with a closure, which a user's `optimizer_step` may
    have replaced."""
    from lightning.pytorch.loops.optimization.closure import AbstractClosure

    return isinstance(closure, AbstractClosure)


_BEFORE_OPTIMIZER = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


def has_hooks_before_optimizer(trainer: Any) -> bool:
    """Return whether the user's module or a callback has a hook between `training_step` and the
    optimizer, or clips gradients itself.

    That depends on classes only, so all ranks agree.
    """
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.utilities.model_helpers import is_overridden

    module = trainer.lightning_module
    return any(
        is_overridden(name, module, LightningModule)
        for name in (*_BEFORE_OPTIMIZER, "configure_gradient_clipping")
    ) or any(
        is_overridden(name, callback, Callback)
        for callback in trainer.callbacks
        for name in _BEFORE_OPTIMIZER
    )


def hooks_of_user(trainer: Any, names: Sequence[str]) -> list[str]:
    """Find the hooks of these names that the user's module or a callback has, as "Class.hook",
    without those of Lightning and this package.

    That depends on classes only, so all ranks agree.
    """
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.utilities.model_helpers import is_overridden

    owners = [
        (trainer.lightning_module, LightningModule),
        *((callback, Callback) for callback in trainer.callbacks),
    ]
    return [
        f"{type(owner).__name__}.{name}"
        for owner, base in owners
        for name in names
        if hasattr(base, name)
        and is_overridden(name, owner, base)
        and not _is_of_library(getattr(owner, name))
    ]


def has_hook_of_library(callback: Any, name: str) -> bool:
    """Whether the hook of this name of a callback is code of Lightning or of this package that does
    something."""
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.model_helpers import is_overridden

    return (
        hasattr(Callback, name)
        and is_overridden(name, callback, Callback)
        and _is_of_library(getattr(callback, name))
    )


def around_hooks(context: Callable[[Any, str], AbstractContextManager[None]] | None) -> None:
    """Make every call of hooks of a trainer, by (trainer, name of the hook), run in a context; None
    for no context.

    Lightning's loops call `lightning.pytorch.trainer.call._call_lightning_module_hook` and
    `_call_callback_hooks` (2.6) as attributes of that module. There is no public place around all
    hooks.
    """
    from lightning.pytorch.trainer import call

    for name in ("_call_lightning_module_hook", "_call_callback_hooks"):
        function = getattr(call, name)
        setattr(call, name, _in_context(getattr(function, "without_context", function), context))


def _in_context(function: Any, context: Any) -> Any:
    if context is None:
        return function

    def run(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        with context(trainer, hook_name):
            return function(trainer, hook_name, *args, **kwargs)

    run.without_context = function  # type: ignore[attr-defined]
    return run


def _is_of_library(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith(("lightning.", "lightning_3d."))


def complete_outputs(closure: Any, outputs: dict[str, Any]) -> None:
    """Add to what hooks get as `outputs` of a batch what `training_step` had not returned yet.

    `Closure._result.extra` (Lightning 2.6) is a copy of what `training_step` returned, apart from
    its loss. It becomes `outputs` when the optimizer has stepped.
    """
    closure._result.extra.update({key: value for key, value in outputs.items() if key != "loss"})


def hush_sync_dist_advice(name: str) -> None:
    """Keep Lightning from advising `sync_dist=True` for a value that is already the same on every
    rank.

    Lightning 2.6 keeps the messages that it showed in a module-level set, under their full text. It
    offers no other way to mark a value as reduced.
    """
    from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache

    warning_cache.add(
        f"It is recommended to use `self.log({name!r}, ..., sync_dist=True)` when logging on epoch"
        " level in distributed setting to accumulate the metric across devices."
    )


def hush_tree_warning() -> None:
    """Silence torch 2.13, which warns on every rank that `LeafSpec`, a name that Lightning 2.6 uses
    itself, is deprecated."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")


def steps_after_this_batch(trainer: Any) -> bool:
    """Return whether the optimizer steps after this batch.

    Lightning's own loop asks `FitLoop._should_accumulate` (2.6), which has no public form.
    """
    return not trainer.fit_loop._should_accumulate()


def finished_requeue(path: str) -> str:
    """The newest complete checkpoint of a requeued job, if Lightning's choice `path` is an
    unfinished one; otherwise `path`.

    Lightning 2.6 (`_CheckpointConnector._hpc_resume_path`) takes the highest number in any name
    with "hpc_ckpt_", even that of a folder that a killed save left unfinished.
    """
    wanted = Path(path)
    if (
        not wanted.name.startswith("hpc_ckpt_")
        or wanted.exists()
        or not aside(wanted, SAVING).exists()
    ):
        return path
    finished = [
        other for other in checkpoints_in(wanted.parent) if other.name.startswith("hpc_ckpt_")
    ]
    return str(finished[0]) if finished else path


def throughputs_of(monitor: Any) -> list[Any]:
    """The counters of a `ThroughputMonitor`, one for each stage (`_throughputs`, Lightning 2.6;
    there is no public reader)."""
    return list(monitor._throughputs.values())


def find_last_at_urls(strategy: type) -> None:
    """Make `ckpt_path="last"` find checkpoints at URLs, in Trainers with a strategy of this class.

    Lightning 2.6 (`ModelCheckpoint._find_last_checkpoints`) drops the protocol of what it lists, so
    it looks on the local disk, warns, and trains from the start. It also asks when each checkpoint
    was modified, which an object store does not know of a folder. So it gets the manifests instead,
    and `CheckpointStore.load` accepts a manifest in place of its checkpoint. The class of callbacks
    is changed, once: Lightning asks them before a strategy is set up.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_3d.storage.checkpoint_names import manifests_in
    from lightning_3d.storage.remote_path import RemotePath, place

    found_by_lightning = ModelCheckpoint._find_last_checkpoints
    if hasattr(found_by_lightning, "at_urls"):
        return

    def find(callback: ModelCheckpoint, trainer: Any) -> set[str]:
        folder = place(callback.dirpath or trainer.default_root_dir)
        if not isinstance(trainer.strategy, strategy) or not isinstance(folder, RemotePath):
            return found_by_lightning(callback, trainer)
        last = str(callback.CHECKPOINT_NAME_LAST)
        return {
            str(manifest)
            for manifest in manifests_in(folder)
            if manifest.parent.name.startswith(last)
        }

    find.at_urls = found_by_lightning  # type: ignore[attr-defined]
    ModelCheckpoint._find_last_checkpoints = find  # type: ignore[assignment, method-assign]
