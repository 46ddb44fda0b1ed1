"""Faults that tests plant in the workers of a self-test. Every worker calls one of them when it
starts."""

import os
import time
from typing import Any

import torch.distributed as dist

from lightning_3d.app.verification import cell_ranks
from lightning_3d.parallel import gloo_exchange


def enlarge_sums() -> None:
    """Make every large sum over ranks a thousandth too large. (Small ones are numbers of tokens, by
    which others are divided.)"""
    dist.all_reduce = _enlarged(dist.all_reduce)
    gloo_exchange.all_reduce = _enlarged(gloo_exchange.all_reduce)
    gloo_exchange.start_all_reduce = _enlarged(gloo_exchange.start_all_reduce)


def _enlarged(plain: Any) -> Any:
    def all_reduce(x: Any, *arguments: Any, **more: Any) -> Any:
        work = plain(x, *arguments, **more)
        if work is not None:
            work.wait()
        if x.is_floating_point() and x.numel() > 1000:
            x *= 1.001
        return work

    return all_reduce


def raise_learning_rate() -> None:
    """Train ranks with a learning rate that is a tenth too large."""
    cell_ranks.LEARNING_RATE *= 1.1


def hang_in_tp() -> None:
    """Let rank 1 never arrive in layouts with tensor parallelism."""
    _before_tp(lambda: time.sleep(1000))


def fail_in_tp() -> None:
    """Let rank 1 raise an error in layouts with tensor parallelism."""
    _before_tp(lambda: _raise(ValueError("planted on purpose")))


def _before_tp(fault: Any) -> None:
    plain = cell_ranks._fit

    def fit(cell: Any, layout: str, *arguments: Any, **more: Any) -> Any:
        if layout.startswith("tp") and os.environ["RANK"] == "1":
            fault()
        return plain(cell, layout, *arguments, **more)

    cell_ranks._fit = fit


def _raise(error: Exception) -> None:
    raise error
