"""Lets the ranks of one machine talk over its loopback interface, so that nobody else can connect
to them. Imports no torch."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface at which gloo listens."""

_PLACE = "lightning_3d/network"


class GlooInterface:
    """The network interface of gloo, chosen unless the user has chosen one.

    It is taken back at the end of a fit, because other programs that this process starts may have
    ranks on other machines.
    """

    def __init__(self) -> None:
        self._chosen = False

    def choose_loopback(self) -> None:
        """Let groups of gloo that are made from here on listen on the loopback interface."""
        if INTERFACE_VARIABLE not in os.environ:
            os.environ[INTERFACE_VARIABLE] = "lo"
            self._chosen = True

    def restore(self) -> None:
        """Take the choice back."""
        if self._chosen:
            os.environ.pop(INTERFACE_VARIABLE, None)
            self._chosen = False


def share_loopback(store: Any, rank: int, world_size: int, seconds: float) -> bool:
    """Check whether all ranks have the same loopback interface. Collective over the world.

    Containers on one machine may each have their own, and the Trainer may have been given a wrong
    number of nodes.

    Args:
        store: a `torch.distributed.Store` of this attempt, which all ranks have joined.
        seconds: time for all ranks to answer.

    Raises:
        RuntimeError: torch's; a rank has not answered.
    """
    store.set(f"{_PLACE}/{rank}", _loopback() or f"none on rank {rank}")
    keys = [f"{_PLACE}/{other}" for other in range(world_size)]
    store.wait(keys, timedelta(seconds=seconds))
    return len({store.get(key) for key in keys}) == 1


def _loopback() -> str:
    """Identify the loopback interface: the machine since it booted, and the network namespace.
    Empty where none can be used."""
    if sys.platform != "linux":
        return ""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return (
                f"{Path('/proc/sys/kernel/random/boot_id').read_text('utf-8').strip()}"
                f" {os.readlink('/proc/self/ns/net')}"
            )
    except OSError:
        return ""
