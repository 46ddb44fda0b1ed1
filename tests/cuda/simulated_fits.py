"""Fits of a user's module with what a real run has: validation, averages, checkpoints in the
background, predictions, traces."""

from __future__ import annotations

import functools
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import checkpoint_fits
import lightning.pytorch as pl
import parity
import pytest
import torch
import torch.distributed as dist
import traced
from checkpoint_fits import TiedModel, make_trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from models import Batch
from parity import Module, Rows, StepValues, quiet_trainer
from reference import Recipe, cut, data
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.checkpoint.store import CheckpointStore
from lightning_3d.compat import torch as torch_compat
from lightning_3d.parallel.zero import make_backend

SAVE = CheckpointStore.save


def straight(layout: str, epochs: int = 2, **more: Any) -> list[float]:
    """Losses of all steps, and of a validation at the end."""
    return checkpoint_fits.fit(layout, epochs, **more)


def save_and_join(store: CheckpointStore, *args: Any) -> bool:
    """Save in the background, and wait for the writer before this thread waits for the GPU, which
    would help a writer that does not."""
    saved = SAVE(store, *args)
    if store._pending is not None:
        store._pending.join(60)
    return saved


def resumed(layout: str, other: str, folder: str, **more: Any) -> list[float]:
    """One epoch that saves in the background, then another that goes on from there, maybe in
    another layout."""
    saved = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    values = StepValues()
    trainer, rows = make_trainer(layout, 1, [values, saved], **more)
    with patch.object(CheckpointStore, "save", save_and_join):
        trainer.fit(TiedModel(), datamodule=rows)
    last = max(Path(folder).glob("step=*"), key=lambda path: int(path.stem.partition("=")[2]))
    return values.losses + checkpoint_fits.fit(other, 2, resume=str(last), **more)


def averaged(layout: str, average: pl.Callback | None = None, **more: Any) -> list[float]:
    """With an exponential average of the weights, which a validation sees: that of Lightning unless
    another is given."""
    values = StepValues()
    trainer, rows = make_trainer(
        layout, 2, [values, average or EMAWeightAveraging(decay=0.8)], **more
    )
    trainer.fit(TiedModel(), datamodule=rows)
    return [*values.losses, float(trainer.callback_metrics["val_loss"])]


class ReadsBatches(StepValues):
    """Reads what each batch has returned and logged, on every rank, as callbacks of users do."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any
    ) -> None:  # type: ignore[override]
        super().on_train_batch_end(trainer, module, outputs, *args)
        self.read += [
            float(outputs["loss"]),
            float(outputs["twice"]),
            float(trainer.callback_metrics["loss_step"]),
        ]


class Returns(Module):
    """Logs its loss and returns more."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, torch.Tensor)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "twice": 2 * loss.detach()}


def accumulated(layout: str) -> list[float]:
    """What callbacks read after each batch of steps of three, and losses and norms of the steps."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe, reads, plan = (
        Recipe(steps=3, global_batch=12),
        ReadsBatches(),
        Lightning3DStrategy(layout, micro_batch_size=2, seed=0),
    )
    assert plan.layout is not None
    trainer = quiet_trainer(
        strategy=plan,
        devices=plan.layout.world_size,
        max_epochs=1,
        accumulate_grad_batches=3,
        callbacks=[reads],
    )
    trainer.fit(Returns(recipe), datamodule=parity.Data(Rows(data(recipe)), 4 // plan.layout.dp))
    return [
        *reads.read,
        float(trainer.callback_metrics["loss_epoch"]),
        *reads.losses,
        *reads.grad_norms,
    ]


def averaged_in_shards() -> list[float]:
    """The same with an average of each rank's shard, which all ranks gather."""
    from lightning_3d import ExponentialAverage

    return averaged("dp2", ExponentialAverage(decay=0.8), zero_stage=1)


def offloading(recipe: Recipe, **strategy: Any) -> parity.Part:
    """With small activations in host memory too, which a real run keeps on the device."""
    from lightning_3d.parallel.blocks import offload

    offload.MINIMUM_BYTES = 256
    return parity.train_on_rank(recipe, offload_activations=True, **strategy)


class ReadsBeside(Module):
    """Reads its parameters before each batch, on a stream of its own."""

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), torch.no_grad():
            for parameter in self.parameters():
                parameter.square()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)


def small_buckets(recipe: Recipe, **strategy: Any) -> parity.Part:
    """A run whose gradients are sent in buckets of a few layers, some of them inside the
    backward."""
    with patch.dict(make_backend.__kwdefaults__, bucket_bytes=4096):
        return parity.train_on_rank(recipe, **strategy)


def read_beside(recipe: Recipe, **strategy: Any) -> parity.Part:
    """Parameters that another stream is the first to read."""
    return parity.fit_on_rank(recipe, Rows(data(recipe)), ReadsBeside(recipe), **strategy)


class ReadsWhole(Module):
    """Reads its whole parameters between steps."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.norms = [parameter.detach().norm() for parameter in self.parameters()]


def read_whole(recipe: Recipe, **strategy: Any) -> parity.Part:
    """Parameters that ranks gather for a hook."""
    return parity.fit_on_rank(recipe, Rows(data(recipe)), ReadsWhole(recipe), **strategy)


def gathered_in_vain() -> None:
    """Parameters whose gather was started and is not needed: their memory goes to something
    else."""
    from lightning_3d.parallel.zero.parameter_units import Unit

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    parameter = torch.nn.Parameter(torch.ones(1 << 20, device=device))
    unit = Unit([parameter], dist.group.WORLD, device)
    for _ in range(3):
        unit.start_gathering()
        unit.free()
        torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()


def paces() -> list[float]:
    """The numbers of both ranks, as ranks compare how fast they compute."""
    from types import SimpleNamespace

    from lightning_3d.strategy.pace import _gather

    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    mesh: Any = SimpleNamespace(
        layout=SimpleNamespace(world_size=2), group_for=lambda ranks: dist.group.WORLD
    )
    return _gather(rank + 1.0, mesh, device).tolist()


def brought_back(recipe: Recipe, **strategy: Any) -> tuple[int, int]:
    """(tensors that the backward needed from the host, those of them whose copy had begun before)
    in a fit."""
    from lightning_3d.parallel.blocks import offload

    needed, begun = 0, 0
    original = offload._OnHost.on_device

    def counted(saved: Any) -> Any:
        nonlocal needed, begun
        needed, begun = needed + 1, begun + (saved._brought is not None)
        return original(saved)

    offload._OnHost.on_device = counted  # type: ignore[method-assign]
    offloading(recipe, **strategy)
    return needed, begun


def brought_back_in_vain() -> None:
    """Activations that come back from the host and are not needed: their memory goes to something
    else."""
    from lightning_3d.parallel.blocks import offload

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    for _ in range(3):
        saved = offload._OnHost(
            torch.ones(1 << 20, device=device), offload._Block(torch.nn.Identity())
        )
        saved.bring_back()
        del saved
        torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()


def locked_in_a_run() -> list[float]:
    """Activations of three shapes, the second and third while messages go from GPU to GPU; what
    comes back."""
    from lightning_3d.compat.host_memory import locking_no_memory
    from lightning_3d.parallel.blocks import offload

    torch.cuda.set_device(0)
    block = offload._Block(torch.nn.Identity())

    def there_and_back(size: int) -> float:
        return offload._OnHost(torch.ones(size, device="cuda"), block).on_device().sum().item()

    found = [there_and_back(1 << 20)]
    with locking_no_memory():
        found += [there_and_back(1 << 20), there_and_back(1 << 21)]
    return found


def written_in_place() -> None:
    """A forward of three blocks that changes what the first has saved."""
    from lightning_3d.parallel.blocks import offload

    torch.cuda.set_device(0)
    hidden = torch.ones(1 << 16, device="cuda", requires_grad=True).clone()
    for number in range(3):
        with offload.SavedOnHost(torch.nn.Identity()):
            squared = hidden * hidden
        if number == 0:
            torch.cuda.synchronize()  # else this is a race, too
            hidden.add_(1)
        hidden = squared


class PenaltyOnGradients(pl.LightningModule):
    """Its backward goes through the blocks in another order than that of their forward reversed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(3))
        self.blocks, self.head = torch.nn.ModuleList(layers), torch.nn.Linear(16, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        [rows] = batch
        hidden = rows = rows.clone().requires_grad_(True)
        for block in self.blocks:
            hidden = block(hidden)
        found = self.head(hidden)
        [gradient] = torch.autograd.grad(found.sum(), rows, create_graph=True)
        return found.square().mean() + gradient.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def penalty(gather: str) -> None:
    from lightning_3d.strategy import Lightning3DStrategy

    strategy = Lightning3DStrategy("dp2", micro_batch_size=2, zero_stage=3, zero_gather=gather)
    rows = TensorDataset(torch.randn(8, 16, generator=torch.Generator().manual_seed(3)))
    quiet_trainer(strategy=strategy, devices=2, max_steps=1).fit(
        PenaltyOnGradients(), DataLoader(rows, batch_size=4)
    )


class Predicts(Module):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        assert self.model is not None
        self.log("val_loss", self.model(**batch).loss)

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        assert self.model is not None
        return self.model(input_ids=batch["input_ids"]).logits.float().mean((1, 2))


def predicted(layout: str, **more: Any) -> list[float]:
    """A validation and predictions before any training."""
    from lightning_3d.strategy import Lightning3DStrategy

    plan = Lightning3DStrategy(layout, **more)
    assert plan.layout is not None
    trainer = quiet_trainer(strategy=plan, devices=plan.layout.world_size)
    module, loader = Predicts(Recipe()), DataLoader(Rows(cut(data(Recipe()), 0, 13)), batch_size=4)
    [metrics] = trainer.validate(module, loader, verbose=False)
    return [metrics["val_loss"], *torch.cat(trainer.predict(module, loader)).tolist()]  # type: ignore[arg-type]


def traces(layout: str, **more: Any) -> tuple[str, int, bool]:
    """Of the traced step: the kind of device, the number of ranks, and whether each rank worked for
    some time."""
    with tempfile.TemporaryDirectory() as folder:
        found, _, _ = traced.fit(folder, layout, 2, **more)
    trace = next(trace for trace in found if trace is not None)
    worked = all(
        work.last > work.first and work.busy > 0 for rank in trace.ranks for work in rank.work
    )
    return trace.device, len(trace.ranks), worked and all(rank.work for rank in trace.ranks)


def interrupted(layout: str, folder: str, kind: str) -> str:
    """One rank raises, or all are told to end, while they train."""

    class Interrupt(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 2 and kind == "raises" and trainer.global_rank == 1:
                raise ValueError("rank 1 fails on purpose")
            if trainer.global_step == 2 and kind == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)

    trainer, rows = make_trainer(
        layout, 2, [Interrupt(), ModelCheckpoint(folder, every_n_train_steps=1)]
    )
    trainer.fit(TiedModel(), datamodule=rows)
    return json.dumps({"step": trainer.global_step})


def compiled(recipe: Recipe, **strategy: Any) -> parity.Part:
    """A run with compiled blocks, each of them one graph. Nothing here can compile kernels of a
    GPU, so Inductor is not asked."""
    before = torch_compat.graph_breaks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        patch.setattr(
            "lightning_3d.parallel.blocks.wrap.importlib.util.find_spec", lambda name: name
        )
        part = parity.train_on_rank(recipe, compile=True, self_check="never", **strategy)
    assert torch_compat.graph_breaks() == before
    return part
