"""Records a run of the strategy: each rank the parts that it has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl

from lightning_3d.engine.data_order import orders_in
from lightning_3d.engine.step import MicroBatches
from lightning_3d.ranks.role import FACTS, RANKS
from lightning_3d.strategy.recorded.draws import EqualDraws, quiet_names
from lightning_3d.strategy.recorded.recorder import Recorder, buffers_of, copied, logged_values
from lightning_3d.strategy.recorded.records import Piece, State, on_host, rows_in
from lightning_3d.strategy.recorded.whole_batches import WholeBatches, save_generators
from lightning_3d.strategy.role_arguments import notes
from lightning_3d.strategy.strategy import Lightning3DStrategy


class LayoutRecorder(Recorder):
    """Records the fit of one rank of a layout."""

    _whole: WholeBatches | None = None
    _micro_batches: MicroBatches | None = None

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage == "fit" and self.role.name != RANKS:
            self._whole = WholeBatches(self.role)
            self._whole.prepare(trainer)
        elif stage == "fit" and trainer.global_rank == 0:
            save_generators(self.role)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = _of(trainer)
        parts = strategy.built.parts
        pipelined = parts.name
        seed = strategy.seed
        self._draws = EqualDraws(module, quiet_names(module, pipelined), seed, strategy.root_device)
        strategy.built.runner.around = self._around
        self.records.specs = dict(strategy.specs)
        self.records.data_index = strategy.mesh.index("dp")
        self._reads = not any(strategy.mesh.index(axis) for axis in ("tp", "cp", "pp"))
        self._strategy = strategy
        self._pipelined = pipelined

    def see_batch(self, trainer: pl.Trainer, batch: Any) -> Any:
        if self._whole is not None:
            batch = self._whole.instead_of(batch, self.batch, trainer.strategy.root_device)
        self._rows = rows_in(batch)
        if self._reads:
            self.records.batches.append(on_host(batch))
            self.records.samples.append(self.samples(trainer))
        return batch

    def _around(
        self, hook: str, micro_batches: MicroBatches, index: int
    ) -> AbstractContextManager[Any]:
        """Let the step draw for its rows. Without a known number of rows, all rows of the
        micro-batch draw as the first ones."""
        strategy = self._strategy
        self._micro_batches = micro_batches
        dealt, dp = strategy.micro_batch_rows, strategy.data_parallel_size
        total = (self._rows or 0) * dp
        first = index * micro_batches.rows
        places = list(dealt.of_rank(strategy.mesh.index("dp"), range(total)))[
            first : first + micro_batches.rows
        ]
        rows = None
        if hook == "training" and self._rows and len(places) == micro_batches.rows:
            step = places[1] - places[0] if len(places) > 1 else 1
            rows = slice(places[0], places[-1] + 1, step)
        return self._draws.around(self.batch, rows, total)

    def state(self, trainer: pl.Trainer, module: pl.LightningModule) -> State:
        built = _of(trainer).built
        weights = {
            shard.name: Piece(shard.start, copied(shard.values))
            for shard in built.backend.weight_shards()
        }
        if not weights:
            weights = {
                name: Piece(None, copied({"weight": value}))
                for name, value in module.named_parameters()
            }
        optimizer = {
            shard.name: Piece(shard.start, copied(shard.values))
            for shard in built.backend.optimizer_shards(to_save=True)
        }
        return State(weights, optimizer, buffers_of(module), logged_values(trainer))

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        step = _of(trainer).last_step
        assert step is not None
        self.records.losses.append(step.loss)
        self.records.norms.append(step.grad_norm)
        if self.batch == 0 and trainer.global_rank == 0 and self.role.name == RANKS:
            self._write_facts(trainer)
        super().on_train_batch_end(trainer, module, outputs, *args)

    def _write_facts(self, trainer: pl.Trainer) -> None:
        strategy = self._strategy
        micro_batches = self._micro_batches
        facts = {
            "seed": strategy.seed,
            "layout": str(strategy.layout),
            "ranks": strategy.world_size,
            "dp": strategy.data_parallel_size,
            "loaders": strategy.data_parallel_size if orders_in(trainer.train_dataloader) else 1,
            "pipelined": self._pipelined,
            "rows": self._rows,
            "micro_batch_rows": micro_batches.rows if micro_batches is not None else None,
            "micro_batches": len(micro_batches) if micro_batches is not None else 1,
            "places": list(self._places()),
            "notes": notes,
            "precision": str(trainer.precision),
        }
        self.role.own.mkdir(parents=True, exist_ok=True)
        (self.role.own / FACTS).write_text(json.dumps(facts))

    def _places(self) -> Iterator[list[int]]:
        """Rows of the global batch that each data-parallel rank reads, in its order."""
        dp = self._strategy.data_parallel_size
        for rank in range(dp):
            yield list(self._strategy.micro_batch_rows.of_rank(rank, range((self._rows or 0) * dp)))


def _of(trainer: pl.Trainer) -> Lightning3DStrategy:
    assert isinstance(trainer.strategy, Lightning3DStrategy)
    return trainer.strategy
