"""Contract tests for what `lightning_compat` uses of Lightning's callbacks."""

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from parity import quiet_trainer
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from lightning_3d.compat.lightning import (
    around_hooks,
    complete_outputs,
    find_last_at_urls,
    has_hooks_before_optimizer,
    has_outputs,
    hooks_of_user,
    hush_tree_warning,
    is_logging,
    logged_entry,
    logging_in_training_step,
    replacing_grad_norm,
    throughputs_of,
)
from lightning_3d.compat.lightning_data import seed_workers
from lightning_3d.compat.lightning_uses import reporting_uses
from lightning_3d.compat.torchmetrics import forward_value


def test_uses_are_reported_inside_the_context_only() -> None:
    module, told = pl.LightningModule(), []
    module.trainer = quiet_trainer()
    for _ in range(2):  # the class is changed once
        with reporting_uses(module, told.append):
            assert module.logger is None and module.loggers == []
            module.print()
            pl.LightningModule().loggers  # noqa: B018 (another module)
    assert module.logger is None and module.loggers == []
    module.print()
    assert told == 2 * ["logger", "logger", "print"]


def test_the_outputs_of_a_closure_can_be_completed_until_they_are_taken() -> None:
    closure = Closure(lambda: ClosureResult(torch.tensor(1.5)))
    assert has_outputs(closure) and not has_outputs(lambda: None)
    closure()
    complete_outputs(closure, {"loss": torch.tensor(9.0), "accuracy": 0.5})
    assert closure.consume_result().asdict() == {"loss": torch.tensor(1.5), "accuracy": 0.5}


def test_another_hook_logs_as_training_step() -> None:
    module = pl.LightningModule()
    module._current_fx_name = "optimizer_step"
    with logging_in_training_step(module):
        assert module._current_fx_name == "training_step"
    assert module._current_fx_name == "optimizer_step"


def test_weights_of_logged_values_may_be_on_the_device() -> None:
    """Means are those of weights that are whole numbers in Python, to the last bit, and a weight of
    0 changes nothing."""
    sizes, values, found = [7, 0, 13, 2**25 + 1], [0.1, 0.0, 1 / 3, -2.7], []
    for as_tensors in (False, True):
        results = _ResultCollection(training=True)
        module: Any = SimpleNamespace(
            trainer=SimpleNamespace(_results=results), _current_fx_name="training_step"
        )
        assert logged_entry(module, "x") is None
        for size, value in zip(sizes, values, strict=True):
            if size or as_tensors:
                batch_size: Any = torch.tensor(size) if as_tensors else size
                results.log(
                    "training_step",
                    "x",
                    torch.tensor(value),
                    on_step=True,
                    on_epoch=True,
                    batch_size=batch_size,
                )
        assert forward_value(logged_entry(module, "x")) == torch.tensor(-2.7)
        found.append(results.metrics(on_step=False)["callback"]["x_epoch"].item())
        results.reset()
        assert logged_entry(module, "x") is None
    assert found[0] == found[1]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch warns of it since 2.13")
def test_lightning_uses_a_name_that_torch_deprecates() -> None:
    """If it does not, `hush_tree_warning` can go."""

    def said(change: Callable[[], None]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            change()
            next(iter(CombinedLoader(DataLoader([1, 2]), "max_size_cycle")))  # type: ignore[arg-type]
        return [str(warning.message) for warning in caught if "LeafSpec" in str(warning.message)]

    assert len(said(lambda: None)) == 1 and said(hush_tree_warning) == []


def test_a_throughput_monitor_has_a_counter_for_each_stage() -> None:
    monitor = ThroughputMonitor(len)
    trainer: Any = quiet_trainer()
    trainer.state.stage = RunningStage.TRAINING
    monitor.setup(trainer, pl.LightningModule(), "fit")
    [counter] = throughputs_of(monitor)
    assert isinstance(counter, Throughput)
    counter.update(time=1.0, batches=1, samples=1)
    assert monitor._throughputs[RunningStage.TRAINING].compute()["samples"] == 1


def test_lightning_forgets_the_protocol_of_what_it_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it remembers, `find_last_at_urls` can go."""
    find = ModelCheckpoint._find_last_checkpoints
    monkeypatch.setattr(ModelCheckpoint, "_find_last_checkpoints", getattr(find, "at_urls", find))
    system = fsspec.filesystem("memory")
    system.pipe_file("/contract/last.ckpt/manifest.json", b'{"global_step": 1}')
    callback, trainer = ModelCheckpoint("memory://contract", save_last=True), quiet_trainer()
    assert callback._find_last_checkpoints(trainer) == {"/contract/last.ckpt"}
    find_last_at_urls(type(trainer.strategy))
    assert callback._find_last_checkpoints(trainer) == {"memory://contract/last.ckpt/manifest.json"}
    system.rm("/contract", recursive=True)


class Hooked(pl.LightningModule):
    """With hooks of its own."""

    def on_after_backward(self) -> None:
        pass


class HookedCallback(pl.Callback):
    """With a hook of its own."""

    def on_before_optimizer_step(self, *args: Any) -> None:
        pass


def test_hooks_of_users_are_found_by_their_classes() -> None:
    names = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
    module, callbacks = (
        Hooked(),
        [HookedCallback(), ThroughputMonitor(lambda batch: 1), pl.Callback()],
    )
    trainer = SimpleNamespace(lightning_module=module, callbacks=callbacks)
    assert hooks_of_user(trainer, names) == [
        "Hooked.on_after_backward",
        "HookedCallback.on_before_optimizer_step",
    ]
    assert hooks_of_user(trainer, ("on_train_start",)) == [], (
        "a callback of Lightning's has this one"
    )
    assert has_hooks_before_optimizer(trainer)
    assert not has_hooks_before_optimizer(
        SimpleNamespace(lightning_module=pl.LightningModule(), callbacks=callbacks[1:])
    )


def test_workers_are_seeded_after_seed_everything_by_the_index_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def own(worker: int) -> None:
        pass

    unseeded, seeded, users = (
        DataLoader([1, 2]),
        DataLoader([1, 2]),
        DataLoader([1, 2], worker_init_fn=own),
    )
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    seed_workers(unseeded, 3)
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    seed_workers(seeded, 3)
    seed_workers(users, 3)
    assert unseeded.worker_init_fn is None and users.worker_init_fn is own
    assert isinstance(
        seeded.worker_init_fn, functools.partial
    ) and seeded.worker_init_fn.keywords == {"rank": 3}
    before = seeded.worker_init_fn
    seed_workers(seeded, 4)
    assert seeded.worker_init_fn is before, "Lightning, which comes later, leaves it"


def test_every_hook_of_a_fit_runs_in_the_context() -> None:
    """`_call_lightning_module_hook` and `_call_callback_hooks`, Lightning 2.6."""
    seen: list[str] = []

    def context(trainer: Any, name: str) -> AbstractContextManager[None]:
        seen.append(name)
        return nullcontext()

    around_hooks(context)
    try:
        quiet_trainer(max_steps=1).fit(BoringModel(), DataLoader(torch.randn(2, 32)))
    finally:
        around_hooks(None)
    assert {
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_zero_grad",
        "optimizer_step",
        "on_train_start",
    } <= set(seen)
    assert not hasattr(call._call_callback_hooks, "without_context")


def test_the_norms_of_gradients_are_replaced_wherever_the_function_was_imported() -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer(torch.ones(1, 2)).sum().backward()
    before = grad_norm(layer, 2)

    def ten_times(original: Any, module: nn.Module, *args: Any) -> dict[str, Any]:
        return {name: 10 * norm for name, norm in original(module, *args).items()}

    with pytest.raises(KeyError), replacing_grad_norm(ten_times):
        assert grad_norm(layer, norm_type=2) == {name: 10 * norm for name, norm in before.items()}
        assert grad_norm(layer, 2, group_separator=".").keys() == {
            "grad_2.0_norm.weight",
            "grad_2.0_norm_total",
        }
        raise KeyError
    assert grad_norm(layer, 2) == before


def test_what_a_module_logs_is_copied_where_it_is_looked_for() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.clone:
                seen.append(is_logging(sys._getframe(1)))
            return func(*args, **(kwargs or {}))

    with Watch():
        pl.LightningModule()._LightningModule__to_tensor(torch.ones(()), "name")  # type: ignore[operator]
        torch.ones(()).clone()
    assert seen == [True, False]
