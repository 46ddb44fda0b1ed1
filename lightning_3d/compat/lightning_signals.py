"""Private APIs of Lightning's signal handling, replaced so that all ranks end a fit before the same
batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def obey_signals_together(trainer: Any) -> None:
    """Make a signal to any rank act on all ranks before the next batch of a fit.

    SIGTERM ends the fit, and so do SIGHUP and the first SIGINT (`obey_terminal`). Where SLURM
    requeues jobs, its signal (SIGUSR1) saves a checkpoint and requeues the job.

    Lightning's handlers (2.6, `_SignalConnector._sigterm_notifier_fn`, `_slurm_sigusr_handler_fn`)
    broadcast and save in the middle of a step, while the other ranks wait for activations that this
    rank then never sends. Here they only note the signal. Where the loop broadcasts rank 0's note
    before every batch (`_TrainingEpochLoop._broadcast_sigterm_tensor`), the notes of all ranks are
    all-reduced in host memory. Outside a fit SIGTERM ends the process at once.
    """
    import signal

    import torch
    import torch.distributed as dist
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.rank_zero import rank_zero_info

    connector = trainer._signal_connector
    save_and_requeue = type(connector)._slurm_sigusr_handler_fn
    ends: list[int] = []
    requeues: list[int] = []

    def note_end(signum: int, frame: Any) -> None:
        if trainer.state.fn != "fit":
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        if trainer.strategy.launcher is not None and not ends:
            trainer.strategy.launcher.kill(signum)
        ends.append(signum)

    def note_requeue(signum: int, frame: Any) -> None:
        requeues.append(signum)

    # a note that a handler appends from here on stays for the next batch
    def taken(notes: list[int]) -> int:
        return max([notes.pop() for _ in range(len(notes))], default=0)

    def act_on_notes() -> None:
        # in host memory: on a device, the host would wait for the step before
        anywhere = torch.tensor([taken(ends), taken(requeues)])
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, trainer.strategy.mesh.world_control)
        end, requeue = anywhere.tolist()
        if requeue:
            with trainer.strategy.saving_at_once():
                save_and_requeue(connector, signal.SIGUSR1, None)
        if end:
            rank_zero_info(f"{signal.Signals(end).name}: the fit stops before the next batch.")
            raise ended_by(SIGTERMException(), end)

    # not passed on: a terminal sends it to all ranks, and a second signal would end them
    obey_terminal(trainer, ends.append)
    register = connector.register_signal_handlers

    def begin() -> None:
        ends.clear()  # what came to this rank while another rank's signal ended the fit before
        requeues.clear()
        register()

    connector.register_signal_handlers = begin
    connector._sigterm_notifier_fn = note_end
    connector._slurm_sigusr_handler_fn = note_requeue
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = act_on_notes


def obey_interrupt_alone(trainer: Any) -> None:
    """Do the same as `obey_signals_together` for a fit of one process: Lightning 2.6 checks
    `received_sigterm` after each batch."""

    def note(signum: int) -> None:
        trainer._signal_connector.received_sigterm = True

    obey_terminal(trainer, note)


def obey_terminal(trainer: Any, note: Callable[[int], None]) -> None:
    """Make SIGHUP and the first SIGINT of a fit that writes checkpoints call `note`; the second
    SIGINT ends this process at once.

    Lightning 2.6 installs its handlers right before the fit starts
    (`_SignalConnector.register_signal_handlers`); its `teardown` restores all earlier handlers,
    also those replaced here. A user's own handler stays, and so does an ignored signal (nohup,
    `&`).
    """
    import signal

    connector = trainer._signal_connector

    def interrupted(signum: int, frame: Any) -> None:
        if signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)
        connector.ended_by = signum
        note(signum)

    def register() -> None:
        type(connector).register_signal_handlers(connector)
        connector.ended_by = signal.SIGTERM
        if trainer.state.fn != "fit" or not trainer.checkpoint_callbacks:
            return
        for signum, default in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGHUP, signal.SIG_DFL),
        ):
            if signal.getsignal(signum) is default:
                connector._register_signal(signum, interrupted)

    connector.register_signal_handlers = register


def ended_by(exception: Any, signum: int) -> Any:
    """Add the signal to the exception that ends a fit, and after Ctrl-C and SIGHUP the exit code
    that a shell expects.

    Lightning 2.6 raises `SIGTERMException`, a `SystemExit` without a code, so a script exits with
    0. Ranks that Lightning's launcher started keep 0, because the rank that started them takes any
    other code for a failure.
    """
    import signal

    from lightning_3d.ranks.reporter import PARENT_VARIABLE

    exception.signal_number = signum
    if signum != signal.SIGTERM and PARENT_VARIABLE not in os.environ:
        exception.code = 128 + signum
    return exception


def name_end(trainer: Any, exception: BaseException) -> None:
    """Complete the exception of a fit of one process, which Lightning itself raised (see
    `ended_by`)."""
    import signal

    if not hasattr(exception, "signal_number"):
        ended_by(exception, getattr(trainer._signal_connector, "ended_by", signal.SIGTERM))
