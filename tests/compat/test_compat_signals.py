"""What Lightning's replaced signal handlers do between two batches of a fit."""

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_3d.compat.lightning_signals import obey_signals_together

DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}


@pytest.fixture
def trainer() -> Iterator[Any]:
    """Yield what the handlers read of a Trainer, with Lightning's own connector and its handlers
    installed."""
    # What a shell starts in the background ignores Ctrl-C, and what nohup starts ignores SIGHUP.
    before = {number: signal.signal(number, handler) for number, handler in DEFAULTS.items()}
    fit: Any = SimpleNamespace(
        state=SimpleNamespace(fn="fit"),
        strategy=SimpleNamespace(launcher=None, mesh=SimpleNamespace(world_control=None)),
        checkpoint_callbacks=[object()],
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace()),
        _accelerator_connector=SimpleNamespace(cluster_environment=None),
    )
    fit._signal_connector = _SignalConnector(fit)
    obey_signals_together(fit)
    fit._signal_connector.register_signal_handlers()
    yield fit
    fit._signal_connector.teardown()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_while_ranks_exchange_notes_ends_the_fit_a_batch_later(
    trainer: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be lost: the rank had sent its note, and forgot all notes after the exchange."""
    signals = [number]

    def signalled(notes: torch.Tensor, op: Any, group: Any) -> None:
        if signals:
            os.kill(os.getpid(), signals.pop())

    monkeypatch.setattr(dist, "all_reduce", signalled)
    act_on_notes = trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor
    act_on_notes()
    with pytest.raises(SIGTERMException) as stopped:
        act_on_notes()
    assert stopped.value.signal_number == number  # type: ignore[attr-defined]
    act_on_notes()


def test_a_signal_to_a_rank_that_another_rank_has_ended_does_not_end_the_next_fit(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_rank_and_this_one(notes: torch.Tensor, op: Any, group: Any) -> None:
        notes[0] = signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(dist, "all_reduce", other_rank_and_this_one)
    act_on_notes = trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor
    with pytest.raises(SIGTERMException):
        act_on_notes()
    trainer._signal_connector.teardown()
    trainer._signal_connector.register_signal_handlers()
    monkeypatch.setattr(dist, "all_reduce", lambda notes, op, group: None)
    act_on_notes()


@pytest.mark.parametrize("number", DEFAULTS)
@pytest.mark.parametrize(
    "own", [signal.SIG_IGN, lambda number, frame: None], ids=["ignored", "handler"]
)
def test_what_a_script_has_set_for_a_signal_stays(trainer: Any, number: int, own: Any) -> None:
    trainer._signal_connector.teardown()
    assert {number: signal.getsignal(number) for number in DEFAULTS} == DEFAULTS, (
        "of the fit, nothing is left"
    )
    signal.signal(number, own)
    trainer._signal_connector.register_signal_handlers()
    assert signal.getsignal(number) is own
