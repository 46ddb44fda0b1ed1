"""Compare a layout with one process: train a module for some steps both ways, and find the largest differences.

The one process is plain Lightning and plain PyTorch: the user's module on whole global batches, without this package's strategy. Both start
from the same weights and see the same rows.
"""

from __future__ import annotations

import copy
import json
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_3d.config.options.blocks import SUPPORTED
from lightning_3d.errors import ConfigError, listed, plural
from lightning_3d.parallel.nested import count_rows, rows_of, tensors_of
from lightning_3d.ranks.progress import Advance, task
from lightning_3d.ranks.supervisor import can_fork, launch
from lightning_3d.strategy.silent_trainer import Batches, silence, silent_trainer
from lightning_3d.strategy.strategy import Lightning3DStrategy
from lightning_3d.weights.initialize import initialize

RELATIVE = {"32-true": 1e-5, "64-true": 1e-10}
"""Largest allowed relative difference of a loss or a gradient norm."""

ABSOLUTE = {"32-true": 5e-5, "64-true": 1e-10}
"""Largest allowed absolute difference of a weight. Adam divides by gradients, so weights differ more than gradients do."""

NOISE = 2
"""Factor by which differences may exceed the noise: the differences in one process when its initial weights change in the last bit."""


@dataclass(frozen=True)
class Difference:
    """Largest differences between ranks and one process.

    Attributes:
        loss: largest relative difference of the loss over all steps.
        grad_norm: largest relative difference of the gradient norm over all steps.
        weight: largest absolute difference of any element of a weight after the last step.
        worst: name of that weight.
        losses: (ranks, one process) of each step.
        norms: (ranks, one process) of each step.
        precision: precision, as Lightning's Trainer takes it.
        noise: the same three differences (loss, gradient norm, weight) between two runs of one process, where the second starts with every
            weight changed in its last bit. They show how large differences from rounding alone become.
    """

    loss: float
    grad_norm: float
    weight: float
    worst: str
    losses: tuple[tuple[float, float], ...]
    norms: tuple[tuple[float, float], ...]
    precision: str = "32-true"
    noise: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def limits(self) -> tuple[float, float, float]:
        """Largest differences of loss, gradient norm and weight that count as rounding."""
        fixed = RELATIVE[self.precision], RELATIVE[self.precision], ABSOLUTE[self.precision]
        loss, norm, weight = (max(limit, NOISE * noise) for limit, noise in zip(fixed, self.noise, strict=True))
        return loss, norm, weight

    @property
    def same(self) -> bool:
        """True if all differences are within their limits, so that they come from rounding alone."""
        return all(value <= limit for value, limit in zip((self.loss, self.grad_norm, self.weight), self.limits, strict=True))

    def __str__(self) -> str:
        what = ("loss", self.loss, "relative"), ("gradient norm", self.grad_norm, "relative"), ("weights", self.weight, "absolute")
        lines = ["largest differences"]
        for (name, value, how), limit, noise in zip(what, self.limits, self.noise, strict=True):
            why = f" ({NOISE} times the effect of changing the last bit of the weights)" if limit == NOISE * noise else ""
            where = f", {self.worst}" if name == "weights" else ""
            lines.append(f"  {name:<14} {value:9.2e}   allowed {limit:.0e} {how}{why}{where}")
        return "\n".join(lines)


def verify(
    module: pl.LightningModule,
    strategy: Mapping[str, Any],
    batches: Sequence[Any],
    *,
    precision: str = "32-true",
    clip: float | None = None,
    strategy_class: type[Lightning3DStrategy] = Lightning3DStrategy,
) -> Difference:
    """Train a module on local CPU ranks and in one process, and compare the results.

    On a platform that cannot fork processes, a script must guard the call with `if __name__ == "__main__":`.

    Args:
        module: the user's module before any fit, built in `__init__` or in `configure_model`. It must not use dropout, whose random
            numbers differ between layouts.
        strategy: arguments of `Lightning3DStrategy`, with a layout of as many ranks as this machine can run.
        batches: one global batch per step, as the module takes it: tensors with rows in dimension 0, in any nesting of dicts,
            lists, tuples and dataclasses.
        precision: "32-true" or "64-true".
        clip: gradient_clip_val of the Trainer.
        strategy_class: class of the strategy.

    Returns:
        The largest differences; `same` is True if rounding alone explains them.

    Raises:
        ConfigError: the precision is unsupported, ranks cannot share a batch equally, or a run failed with an error that the user can fix.
        RuntimeError: a run failed for another reason, which the message contains.
    """
    if precision not in RELATIVE:
        raise ConfigError(f"precision must be 32-true or 64-true for verify, because lower precisions hide differences; got {precision}.")
    layout = strategy_class(**strategy).layout
    if layout is None:
        raise ConfigError("verify needs a layout in strategy, for example strategy={'layout': 'tp2_pp2_dp2'}.")
    _check_batches(batches, layout.dp)
    run = _Run(module, dict(strategy), list(batches), precision, clip, strategy_class)
    with tempfile.TemporaryDirectory(prefix="lightning_3d_verify_") as folder:
        _start(_on_rank, (run, folder), layout.world_size, Path(folder))
        _start(_on_one, (run, folder), 1, Path(folder))
        found: dict[str, Any] = json.loads((Path(folder) / _RESULT).read_text())
    found |= {key: tuple(map(tuple, found[key])) for key in ("losses", "norms")} | {"noise": tuple(found["noise"])}
    return Difference(**found)


def _check_batches(batches: Sequence[Any], dp: int) -> None:
    if not batches:
        raise ConfigError("verify needs one global batch for each step; got none.")
    for index, batch in enumerate(batches):
        rows = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors_of(batch)}
        if len(rows) != 1 or 0 in rows or min(rows) % dp:
            found = f"tensors with {listed(sorted(rows))} rows" if rows else "no tensors"
            raise ConfigError(
                f"All tensors of a global batch must have the same number of rows in dimension 0, divisible by dp={dp}; batch {index} has"
                f" {found}."
            )


_RESULT = "result.json"


@dataclass(frozen=True)
class _Run:
    """Training job that all processes run."""

    module: pl.LightningModule
    strategy: dict[str, Any]
    batches: list[Any]
    precision: str
    clip: float | None
    strategy_class: type[Lightning3DStrategy]

    @property
    def seed(self) -> int:
        seed = self.strategy.get("seed")
        return 0 if seed is None else int(seed)


def _start(job: Any, arguments: tuple[Any, ...], count: int, folder: Path) -> None:
    outcome = launch(job, arguments, count, logs=folder / "logs", fork=can_fork(), threads=1)
    if outcome.exit_code and outcome.message is None:  # a signal
        raise KeyboardInterrupt if outcome.exit_code == 128 + signal.SIGINT else SystemExit(outcome.exit_code)
    if outcome.exit_code:
        kind = ConfigError if outcome.exit_code == ConfigError.exit_code else RuntimeError
        raise kind(str(outcome.message).removeprefix("lightning_3d: "))


class _Data(pl.LightningDataModule):
    """Data module with the rows of each batch that belong to one of `ranks` data-parallel ranks."""

    def __init__(self, run: _Run, ranks: int) -> None:
        super().__init__()
        self._batches, self._ranks = run.batches, ranks

    def train_dataloader(self) -> Batches:
        assert self.trainer is not None
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0}
        return Batches([rows_of(batch, slice(place["rank"], None, self._ranks), count_rows(batch)) for batch in self._batches])


class _Values(pl.Callback):
    """Callback that records loss and gradient norm of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.advance: Advance = lambda steps: None

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if isinstance(trainer.strategy, Lightning3DStrategy):
            return
        squares = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.advance(1)
        strategy = trainer.strategy
        if isinstance(strategy, Lightning3DStrategy):
            assert strategy.last_step is not None and strategy.last_step.grad_norm is not None
            self.losses.append(strategy.last_step.loss)
            self.norms.append(strategy.last_step.grad_norm)
        else:
            self.losses.append(float(outputs["loss"]))


def _fit(
    run: _Run, module: pl.LightningModule, ranks: int, values: _Values, *callbacks: pl.Callback, what: str, **arguments: Any
) -> pl.Trainer:
    """Train on all batches, with the rows of one of `ranks` data-parallel ranks. `what` names the run for the user."""
    with silence(), task(what, len(run.batches), "steps") as values.advance:
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
    """Train one rank, and save its losses, norms and shards of the weights."""
    values = _Values()
    strategy = run.strategy_class(**{**run.strategy, "seed": run.seed})
    if run.strategy.get("sequence_parallel") is None:  # ranks on GPUs have it by default, and they are what matters
        blocks = replace(strategy.options.blocks, sequence_parallel=SUPPORTED)
        strategy.options = replace(strategy.options, blocks=blocks)
    assert strategy.layout is not None
    count = strategy.layout.world_size
    what = f"training on {plural(count, 'rank')}"
    trainer = _fit(run, run.module, strategy.layout.dp, values, what=what, strategy=strategy, devices=count)
    weights = {name: (parameter.detach().clone(), strategy.specs[name]) for name, parameter in run.module.named_parameters()}
    torch.save((values.losses, values.norms, weights), Path(folder) / f"rank_{trainer.global_rank}.pt")


class _Whole(pl.Callback):
    """Callback that gives a module built on meta the same initial weights as the strategy."""

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
    """Train in this process, and compare with the results that the ranks saved."""
    values, whole = _train_whole(run, "training in one process")
    worst, largest = "", -1.0
    for path in sorted(Path(folder).glob("rank_*.pt")):
        losses, norms, weights = torch.load(path, weights_only=False)
        for name, (local, spec) in weights.items():
            difference = (spec.cut(whole[name]) - local).abs().max().item() if local.numel() else 0.0
            if not difference <= largest:  # a NaN counts as the largest
                worst, largest = name, difference
    found = Difference(
        _relative(losses, values.losses),
        _relative(norms, values.norms),
        largest,
        worst,
        tuple(zip(losses, values.losses, strict=True)),
        tuple(zip(norms, values.norms, strict=True)),
        run.precision,
        _noise(run, values, whole),
    )
    (Path(folder) / _RESULT).write_text(json.dumps(asdict(found)))


class _LastBits(pl.Callback):
    """Callback that changes every weight by its last bit, up or down at random, before the first step."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for parameter in filter(torch.is_floating_point, module.parameters()):
            up = torch.rand(parameter.shape, generator=self._generator) < 0.5
            parameter.mul_(1 + torch.where(up, 1.0, -1.0) * torch.finfo(parameter.dtype).eps)


def _train_whole(run: _Run, what: str, *callbacks: pl.Callback) -> tuple[_Values, dict[str, Tensor]]:
    """Train in this process, and return losses, norms and the final weights by name."""
    values, module = _Values(), copy.deepcopy(run.module)
    _fit(run, module, 1, values, _Whole(run.seed), *callbacks, what=what, devices=1)
    return values, {name: parameter.detach() for name, parameter in module.named_parameters(remove_duplicate=False)}


def _noise(run: _Run, values: _Values, whole: Mapping[str, Tensor]) -> tuple[float, float, float]:
    """Measure `Difference.noise`."""
    again, weights = _train_whole(run, "training again, with the last bit of each weight changed", _LastBits(run.seed))
    largest = max(((weights[name] - weight).abs().max().item() for name, weight in whole.items() if weight.numel()), default=0.0)
    return _relative(again.losses, values.losses), _relative(again.norms, values.norms), largest


def _relative(found: Sequence[float], wanted: Sequence[float]) -> float:
    differences = [abs(one - other) / max(abs(other), 1e-12) for one, other in zip(found, wanted, strict=True)]
    return float("nan") if any(value != value for value in differences) else max(differences)
