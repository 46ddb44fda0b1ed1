"""Records a run of plain Lightning on one process, which trains on the rows that the layout's ranks
have read."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_3d.ranks.role import Role
from lightning_3d.strategy.recorded.draws import EqualDraws, quiet_names
from lightning_3d.strategy.recorded.recorder import Recorder, buffers_of, copied, logged_values
from lightning_3d.strategy.recorded.records import Piece, State, on_host
from lightning_3d.strategy.recorded.whole_batches import WholeBatches
from lightning_3d.weights.initialize import initialize


class PlainRecorder(Recorder):
    """Records the fit of one process, and gives it the weights, rows and random numbers of the
    layout's run."""

    def __init__(self, role: Role) -> None:
        super().__init__(role)
        self._whole = WholeBatches(role)
        self._norm: float | None = None

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage == "fit":
            module.configure_model = _built_on_meta(module, self._whole.facts["seed"])  # type: ignore[method-assign]
            self._whole.prepare(trainer)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        facts = self._whole.facts
        draws = EqualDraws(
            module, quiet_names(module, facts["pipelined"]), facts["seed"], module.device
        )
        step = module.training_step

        @wraps(step)
        def drawing(*args: Any, **kwargs: Any) -> Any:
            with draws.around(self.batch, None, 0):
                return step(*args, **kwargs)

        module.training_step = drawing  # type: ignore[method-assign]

    def see_batch(self, trainer: pl.Trainer, batch: Any) -> Any:
        """Return the rows that the ranks have read, also where this process would read others: then
        the comparison says so."""
        self.records.batches.append(on_host(batch))
        self.records.samples.append(self.samples(trainer))
        return self._whole.instead_of(batch, self.batch, trainer.strategy.root_device)

    def state(self, trainer: pl.Trainer, module: pl.LightningModule) -> State:
        weights = {
            name: Piece(None, copied({"weight": value}))
            for name, value in module.named_parameters(remove_duplicate=False)
        }
        kept = trainer.optimizers[0].state if trainer.optimizers else {}
        optimizer = {
            name: Piece(None, copied(kept[value]))
            for name, value in module.named_parameters(remove_duplicate=False)
            if value in kept
        }
        return State(weights, optimizer, buffers_of(module), logged_values(trainer))

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Take the norm of what the optimizers train, as the strategy does, before any hook of the
        user's changes gradients. With accumulation, that of the last batch counts."""
        trained = [
            p
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        squares = [p.grad.double().square().sum() for p in trained if p.grad is not None]
        self._norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        loss = float(outputs["loss"] if isinstance(outputs, dict) else outputs)
        # Lightning has divided it
        self.records.losses.append(loss * trainer.accumulate_grad_batches)
        self.records.norms.append(self._norm)
        super().on_train_batch_end(trainer, module, outputs, *args)


class LastBits(pl.Callback):
    """Callback that changes every weight by its last bit, up or down at random, before the first
    step."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for parameter in filter(torch.is_floating_point, module.parameters()):
            up = torch.rand(parameter.shape, generator=self._generator) < 0.5
            change = (
                torch.where(up, 1.0, -1.0).to(parameter.device) * torch.finfo(parameter.dtype).eps
            )
            parameter.mul_(1 + change.to(parameter.dtype))


def _built_on_meta(module: pl.LightningModule, seed: int) -> Callable[[], None]:
    """Make `configure_model` give the module the initial weights that the strategy gives it."""
    configure = module.configure_model

    @wraps(configure)
    def build() -> None:
        with torch.device("meta"):
            configure()
        initialize(module, seed)

    return build
