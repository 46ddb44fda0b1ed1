"""Records a run of plain Lightning on one process, which trains on the rows that the layout's ranks have read."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import BatchSampler, DataLoader

from lightning_3d.ranks.role import RANKS, Role
from lightning_3d.strategy.recorded.draws import EqualDraws, quiet_names
from lightning_3d.strategy.recorded.records import Piece, Records, State, merged, on_host, rows_in, same_values
from lightning_3d.strategy.recorded.recorder import Recorder, buffers_of, copied, logged_values
from lightning_3d.weights.initialize import initialize


class PlainRecorder(Recorder):
    """Records the fit of one process, and gives it the weights, rows and random numbers of the layout's run."""

    def __init__(self, role: Role) -> None:
        super().__init__(role)
        self._facts = role.facts()
        ranks = Records.load(role.folder / RANKS)
        readers = sorted((rank for rank in ranks if rank.batches), key=lambda rank: rank.data_index)
        self._read = [reader.batches for reader in readers]
        self._norm: float | None = None

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage != "fit":
            return
        module.configure_model = _built_on_meta(module, self._facts["seed"])  # type: ignore[method-assign]
        process = trainer.strategy.process_dataloader

        def enlarged(loader: object) -> object:
            _enlarge(loader, self._facts["loaders"])
            return process(loader)

        trainer.strategy.process_dataloader = enlarged  # type: ignore[method-assign]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        draws = EqualDraws(module, quiet_names(module, self._facts["pipelined"]), self._facts["seed"], module.device)
        step = module.training_step

        @wraps(step)
        def drawing(*args: Any, **kwargs: Any) -> Any:
            with draws.around(self.batch, None, 0):
                return step(*args, **kwargs)

        module.training_step = drawing  # type: ignore[method-assign]

    def see_batch(self, trainer: pl.Trainer, batch: Any) -> Any:
        """Return the rows that the ranks have read, also where this process would read others: then the comparison says so."""
        self.records.batches.append(on_host(batch))
        self.records.samples.append(self.samples(trainer))
        parts = [batches[self.batch] for batches in self._read]
        counts = [rows_in(part) for part in parts]
        places = [list(range(rank, count * len(parts), len(parts))) for rank, count in enumerate(counts) if count]
        if counts[0] == self._facts["rows"] and len(set(counts)) == 1:
            places = self._facts["places"]
        if len(places) < len(parts) or len(set(counts)) > 1:
            return batch
        whole = merged(parts, places)
        return batch if same_values(whole, batch) else _moved(whole, trainer.strategy.root_device)

    def state(self, trainer: pl.Trainer, module: pl.LightningModule) -> State:
        weights = {name: Piece(None, copied({"weight": value})) for name, value in module.named_parameters(remove_duplicate=False)}
        kept = trainer.optimizers[0].state if trainer.optimizers else {}
        optimizer = {
            name: Piece(None, copied(kept[value])) for name, value in module.named_parameters(remove_duplicate=False) if value in kept
        }
        return State(weights, optimizer, buffers_of(module), logged_values(trainer))

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Take the norm before any hook of the user's changes gradients; with accumulation, that of the last batch counts."""
        squares = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
        self._norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.records.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))
        self.records.norms.append(self._norm)
        super().on_train_batch_end(trainer, module, outputs, *args)


class LastBits(pl.Callback):
    """Callback that changes every weight by its last bit, up or down at random, before the first step."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for parameter in filter(torch.is_floating_point, module.parameters()):
            up = torch.rand(parameter.shape, generator=self._generator) < 0.5
            change = torch.where(up, 1.0, -1.0).to(parameter.device) * torch.finfo(parameter.dtype).eps
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


def _enlarge(loader: object, ranks: int) -> None:
    """Let a loader read the rows of all data-parallel ranks in one batch."""
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if type(batches) is not BatchSampler or ranks == 1:
        return
    batches.batch_size *= ranks
    vars(loader)["batch_size"] = batches.batch_size  # DataLoader refuses to have it set


def _moved(batch: Any, device: torch.device) -> Any:
    from lightning.fabric.utilities import move_data_to_device

    return move_data_to_device(batch, device)


