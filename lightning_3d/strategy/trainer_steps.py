"""The optimizer steps of a fit, as Lightning's loop calls them: `training_step` for each batch, and
a closure around the last."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_3d.compat.lightning import (
    complete_outputs,
    has_hooks_before_optimizer,
    has_outputs,
    logging_in_training_step,
    run_after_closure,
    steps_after_this_batch,
)
from lightning_3d.engine.built_model import BuiltModel
from lightning_3d.engine.optimizer_step import OptimizerStep
from lightning_3d.engine.step import StepResult
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.strategy.gradient_hooks import GradientHooks
from lightning_3d.strategy.hook_reads import HookReads


class TrainerSteps:
    """Drives the engine of a module, and watches the user's hooks around its steps.

    Args:
        module: the user's module.
        built: its engine.
        precision: Lightning's plugin.

    Attributes:
        running: the optimizer step that runs, or the last one; None before the first.
        hooks: sees gradients that the user's hooks read and write.
    """

    def __init__(
        self, module: pl.LightningModule, built: BuiltModel, zero: ZeroOptions, precision: Precision
    ) -> None:
        self._module, self._built, self._precision = module, built, precision
        self.hooks = GradientHooks(module, built.mesh, built.parts.specs, built.backend, zero)
        self.running: OptimizerStep | None = None
        self._launches_first = False

    def begin_fit(self) -> None:
        """Expect the first batch of a step: an earlier fit may have ended in the middle of one."""
        self.running = None
        self._built.begin_fit()
        self.hooks.begin_fit()

    @property
    def reads(self) -> HookReads:
        """Sees parameters that the user's steps and hooks read outside of the model."""
        reads = self._built.reads
        assert isinstance(reads, HookReads)
        return reads

    def around_hook(self, trainer: pl.Trainer, name: str) -> AbstractContextManager[None]:
        """Context of a hook of the module or of a callback."""
        if trainer.lightning_module is self._module:
            self._built.runner.left.share_before(name)
        return self.reads.in_hook(trainer, name)

    def add(self, batch: Any, rest: tuple[Any, ...]) -> tuple[OptimizerStep, dict[str, Any]]:
        """Run a batch of the running step, or of the next one. Returns the step, and what
        `training_step` returned."""
        step = self.running
        if step is None or step.has_all:
            step = self.running = OptimizerStep(self._built)
        ends = steps_after_this_batch(self._module.trainer)
        outputs = step.add(batch, rest, ends=ends)
        if ends:
            step.measure(launch_first=self._launches_first)
        return step, outputs

    def run(self, optimizer: Optimizer, closure: Callable[[], Any]) -> tuple[Any, StepResult]:
        """Run the closure, which adds the last batch, and step the optimizer. Returns what the
        closure returned, and the numbers."""
        # Hooks before the optimizer must not run in a step that is then skipped, and see the logged
        # values of their own step.
        self._launches_first = has_outputs(closure) and not has_hooks_before_optimizer(
            self._module.trainer
        )
        try:
            result = closure()
        finally:
            self._launches_first = False
        step = self.running
        assert step is not None and step.result is not None
        step.take(partial(self._before_optimizer, optimizer), partial(self._publish, step, closure))
        return result, step.result

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        """Run the hooks between backward and optimizer step, and clip."""
        with self.hooks.watching():
            run_after_closure(self._precision, self._module, optimizer)

    def _publish(self, step: OptimizerStep, closure: Callable[[], Any]) -> None:
        """Publish the numbers of a step whose optimizer was launched."""
        with logging_in_training_step(self._module):
            complete_outputs(closure, step.publish())

    def clip(
        self,
        optimizer: Optimizer,
        clip_val: float | None = 0.0,
        gradient_clip_algorithm: str | None = "norm",
    ) -> None:
        """Take the place of the plugin's `clip_gradients`: clip by the norm over all ranks, or by
        value."""
        if clip_val and clip_val > 0:
            algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
            self._built.clip(float(clip_val), algorithm, changed=self.hooks.change_gradients)
