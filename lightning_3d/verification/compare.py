"""Whether a layout computes what one process computes: some steps of a module in both, and their largest differences.

The one process is plain Lightning and plain PyTorch: the user's module on whole global batches, without this package's strategy. Both begin
with the same weights and see the same rows.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_3d.errors import ConfigError
from lightning_3d.initialization import initialize
from lightning_3d.launch import can_fork, launch
from lightning_3d.silent_trainer import silence, silent_trainer
from lightning_3d.strategy import Lightning3DStrategy

RELATIVE = {"32-true": 1e-5, "64-true": 1e-10}
"""Largest allowed difference of a loss or a gradient norm, relative."""

ABSOLUTE = {"32-true": 5e-5, "64-true": 1e-10}
"""Of a weight. Adam divides by gradients, so that weights differ by more than their gradients do."""


@dataclass(frozen=True)
class Difference:
    """Largest differences between ranks and one process.

    Attributes:
        loss, grad_norm: over all steps, relative. weight: of any element of a weight after the last step; `worst` is its name.
        losses, norms: (ranks, one process) of each step. precision: as Lightning's Trainer takes it.
    """

    loss: float
    grad_norm: float
    weight: float
    worst: str
    losses: tuple[tuple[float, float], ...]
    norms: tuple[tuple[float, float], ...]
    precision: str = "32-true"

    @property
    def same(self) -> bool:
        """Whether they differ by rounding alone."""
        relative, absolute = RELATIVE[self.precision], ABSOLUTE[self.precision]
        return self.loss <= relative and self.grad_norm <= relative and self.weight <= absolute

    def __str__(self) -> str:
        relative, absolute = RELATIVE[self.precision], ABSOLUTE[self.precision]
        rows = [
            ("loss", self.loss, relative, "relative"),
            ("gradient norm", self.grad_norm, relative, "relative"),
            ("weights", self.weight, absolute, f"absolute, {self.worst}"),
        ]
        lines = [f"  {name:<14} {value:9.2e}   allowed {limit:.0e} {how}" for name, value, limit, how in rows]
        return "largest difference\n" + "\n".join(lines)


def verify(
    module: pl.LightningModule,
    strategy: Mapping[str, Any],
    batches: Sequence[Mapping[str, Tensor]],
    *,
    precision: str = "32-true",
    clip: float | None = None,
    strategy_class: type[Lightning3DStrategy] = Lightning3DStrategy,
) -> Difference:
    """Train a module on local CPU ranks and in one process, and compare.

    A script that calls this must guard it with `if __name__ == "__main__":` where processes cannot be forked.

    Args:
        module: of the user, before any fit; eager, or with `configure_model`. Without dropout: a layout draws other numbers.
        strategy: arguments of `Lightning3DStrategy`, with a layout of as many ranks as this machine can run.
        batches: global batches, one for each step: tensors with rows in dimension 0.
        precision: "32-true" or "64-true". clip: gradient_clip_val of the Trainer.

    Raises:
        ConfigError: another precision, or batches that the ranks cannot share. RuntimeError: a run failed; with what it said.
    """
    if precision not in RELATIVE:
        raise ConfigError(f"verify compares in 32-true or 64-true, not in {precision}: coarser types hide what differs.")
    layout = strategy_class(**strategy).layout
    if layout is None:
        raise ConfigError("verify needs a layout, for example strategy={'layout': 'tp2_pp2_dp2'}.")
    rows = {len(tensor) for batch in batches for tensor in batch.values()}
    if len(rows) != 1 or rows.pop() % layout.dp:
        raise ConfigError(f"All batches must have as many rows, divisible by dp={layout.dp}.")
    run = _Run(module, dict(strategy), list(batches), precision, clip, strategy_class)
    with tempfile.TemporaryDirectory(prefix="lightning_3d_verify_") as folder:
        _start(_on_rank, (run, folder), layout.world_size, Path(folder))
        _start(_on_one, (run, folder), 1, Path(folder))
        found: dict[str, Any] = json.loads((Path(folder) / _RESULT).read_text())
    found |= {key: tuple(map(tuple, found[key])) for key in ("losses", "norms")}
    return Difference(**found)


_RESULT = "result.json"


@dataclass(frozen=True)
class _Run:
    """What all processes get."""

    module: pl.LightningModule
    strategy: dict[str, Any]
    batches: list[Mapping[str, Tensor]]
    precision: str
    clip: float | None
    strategy_class: type[Lightning3DStrategy]

    @property
    def seed(self) -> int:
        seed = self.strategy.get("seed")
        return 0 if seed is None else int(seed)


def _start(job: Any, arguments: tuple[Any, ...], count: int, folder: Path) -> None:
    outcome = launch(job, arguments, count, logs=folder / "logs", fork=can_fork(), threads=1)
    if outcome.exit_code:
        raise RuntimeError(outcome.message or f"A run ended with exit code {outcome.exit_code}.")


class _Rows(Dataset[dict[str, Tensor]]):
    """The rows of all batches, in their order."""

    def __init__(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self._tensors = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: tensor[index] for key, tensor in self._tensors.items()}


class _Data(pl.LightningDataModule):
    """Deals rows in their order."""

    def __init__(self, run: _Run, ranks: int) -> None:
        super().__init__()
        self._rows, self._size = _Rows(run.batches), len(next(iter(run.batches[0].values()))) // ranks

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        assert self.trainer is not None
        places = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        sampler: DistributedSampler[dict[str, Tensor]] = DistributedSampler(self._rows, shuffle=False, **places)
        return DataLoader(self._rows, batch_size=self._size, sampler=sampler)


class _Values(pl.Callback):
    """Loss and gradient norm of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if isinstance(trainer.strategy, Lightning3DStrategy):
            return
        squares = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, Lightning3DStrategy):
            assert strategy.last_step is not None and strategy.last_step.grad_norm is not None
            self.losses.append(strategy.last_step.loss)
            self.norms.append(strategy.last_step.grad_norm)
        else:
            self.losses.append(float(outputs["loss"]))


def _fit(run: _Run, module: pl.LightningModule, ranks: int, values: _Values, *callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    """Train on all batches, of which this process gets the part of one of so many data ranks."""
    with silence():
        trainer = silent_trainer(
            precision=run.precision,
            max_steps=len(run.batches),
            gradient_clip_val=run.clip,
            callbacks=[values, *callbacks],
            **arguments,
        )
        trainer.fit(module, datamodule=_Data(run, ranks))
    return trainer


def _on_rank(run: _Run, folder: str) -> None:
    """Train this rank's part, and leave what it has at the end."""
    values = _Values()
    strategy = run.strategy_class(**{**run.strategy, "seed": run.seed})
    assert strategy.layout is not None
    trainer = _fit(run, run.module, strategy.layout.dp, values, strategy=strategy, devices=strategy.layout.world_size)
    weights = {name: (parameter.detach().clone(), strategy.specs[name]) for name, parameter in run.module.named_parameters()}
    torch.save((values.losses, values.norms, weights), Path(folder) / f"rank_{trainer.global_rank}.pt")


class _Whole(pl.Callback):
    """Gives a module that is built on meta the weights that the strategy gives it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        configure = module.configure_model

        def build() -> None:
            with torch.device("meta"):
                configure()
            initialize(module, self._seed)

        module.configure_model = build  # type: ignore[method-assign]


def _on_one(run: _Run, folder: str) -> None:
    """Train in this process, and compare with what the ranks left."""
    values = _Values()
    module = copy.deepcopy(run.module)
    _fit(run, module, 1, values, _Whole(run.seed), devices=1)
    whole = dict(module.named_parameters(remove_duplicate=False))
    worst, largest = "", -1.0
    for path in sorted(Path(folder).glob("rank_*.pt")):
        losses, norms, weights = torch.load(path, weights_only=False)
        for name, (local, spec) in weights.items():
            difference = (spec.cut(whole[name].detach()) - local).abs().max().item() if local.numel() else 0.0
            if not difference <= largest:  # a NaN is the largest
                worst, largest = name, difference
    found = Difference(
        _relative(losses, values.losses),
        _relative(norms, values.norms),
        largest,
        worst,
        tuple(zip(losses, values.losses, strict=True)),
        tuple(zip(norms, values.norms, strict=True)),
        run.precision,
    )
    (Path(folder) / _RESULT).write_text(json.dumps(asdict(found)))


def _relative(found: Sequence[float], wanted: Sequence[float]) -> float:
    differences = [abs(one - other) / max(abs(other), 1e-12) for one, other in zip(found, wanted, strict=True)]
    return float("nan") if any(value != value for value in differences) else max(differences)
