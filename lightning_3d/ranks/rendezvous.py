"""The address where the ranks of a run meet: MASTER_ADDR and MASTER_PORT are checked before any
rank waits there.

torch's own errors come as tracebacks, or after half an hour. Importing this module imports no
torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from lightning_3d.errors import ConfigError

CHOSEN_VARIABLE = "LIGHTNING_3D_PORT"
"""Environment variable with the port that this package chose, to recognize later where MASTER_PORT
comes from."""

_REACH_SECONDS = 5.0
_RESOLVE_SECONDS = 60.0
_ADVICE = "Unset {name} to use any free port, or set it to another port."
_SAME_ADVICE = "Set it to a free port, the same for all ranks."
_LOCAL = "Because all ranks run on this machine, you can unset MASTER_ADDR or set it to 127.0.0.1."


def read_port(text: str, name: str = "MASTER_PORT", advice: str = _ADVICE) -> int:
    """Read a port from the value of an environment variable.

    Raises:
        ConfigError: it is not a whole number from 1 to 65535.
    """
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise ConfigError(
            f"{name} must be a whole number from 1 to 65535; got {text!r}."
            f" {advice.format(name=name)}"
        )
    return int(text)


def hold_meeting_point(cluster_environment: Any, num_nodes: int) -> socket.socket | None:
    """Check where the ranks will meet before they start, and reserve the port. For local rank 0.

    Sets MASTER_PORT if a run on one machine has none.

    Returns:
        A socket that reserves the port without keeping rank 0 from listening on it; None on nodes
        other than the first.

    Raises:
        ConfigError: rank 0 cannot listen on the port, or the address does not lead to this machine.
    """
    given = next((name for name in ("MASTER_PORT", "STANDALONE_PORT") if name in os.environ), None)
    if given is not None:
        read_port(os.environ[given], given)
    elif num_nodes > 1 and _takes_any_port(cluster_environment):
        raise ConfigError(
            f"A run on {num_nodes} nodes needs MASTER_ADDR and MASTER_PORT, the same on every node:"
            " the address of node 0 and a free port on it."
        )
    if cluster_environment.node_rank() > 0:
        return None
    if given is None and _takes_any_port(cluster_environment):
        holder = _bind(0, "MASTER_PORT", _ADVICE)
        os.environ["MASTER_PORT"] = os.environ[CHOSEN_VARIABLE] = str(holder.getsockname()[1])
        # it was asked before, and keeps its answer
        if cluster_environment.main_port != holder.getsockname()[1]:
            holder.close()
            holder = _bind(int(cluster_environment.main_port), "MASTER_PORT", _ADVICE)
            os.environ["MASTER_PORT"] = os.environ[CHOSEN_VARIABLE] = str(
                cluster_environment.main_port
            )
    else:
        name = given or type(cluster_environment).__name__
        holder = _bind(
            int(cluster_environment.main_port), name, _ADVICE if num_nodes == 1 else _SAME_ADVICE
        )
    if num_nodes == 1:
        try:
            _require_local(cluster_environment.main_address)
        except ConfigError:
            holder.close()
            raise
    return holder


@contextlib.contextmanager
def explained_errors(rank: int) -> Iterator[None]:
    """Check MASTER_ADDR and MASTER_PORT, and explain in one message why torch cannot connect.

    For ranks that a launcher started, whose address may become resolvable a little after they
    start.

    Raises:
        ConfigError: rank 0 cannot listen, the port is not one, or the address cannot be resolved.
    """
    port = (
        read_port(os.environ["MASTER_PORT"], advice=_SAME_ADVICE)
        if "MASTER_PORT" in os.environ
        else 0
    )
    _resolve(os.environ.get("MASTER_ADDR", "127.0.0.1"), _RESOLVE_SECONDS)
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistNetworkError
        if rank == 0 and "EADDRINUSE" in str(error):
            raise _taken(port, "MASTER_PORT", _SAME_ADVICE) from None
        raise


def _takes_any_port(cluster_environment: Any) -> bool:
    """Check whether a cluster environment leaves the meeting point open: Lightning's uses
    environment variables, or any port."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    return isinstance(cluster_environment, LightningEnvironment)


def _bind(port: int, name: str, advice: str) -> socket.socket:
    """Bind a socket that holds a port but does not listen, on all addresses as torch's server will.

    With SO_REUSEADDR on both sides, the server of rank 0 can listen there meanwhile.
    """
    dual = socket.has_dualstack_ipv6()
    holder = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if dual:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("::" if dual else "", port))
    except OSError as error:
        holder.close()
        if error.errno == errno.EADDRINUSE:
            raise _taken(port, name, advice) from None
        raise ConfigError(
            f"Rank 0 cannot listen on port {port} ({name}): {error.strerror}."
            f" {advice.format(name=name)}"
        ) from None
    return holder


def _taken(port: int, name: str, advice: str) -> ConfigError:
    if os.environ.get(CHOSEN_VARIABLE) == str(port):
        return ConfigError(
            f"Another program took port {port}, which had been chosen for the ranks, before rank 0"
            " could listen on it. Start again, or set MASTER_PORT to a free port."
        )
    return ConfigError(
        f"Rank 0 must listen on port {port} ({name}), but another program uses it."
        f" {advice.format(name=name)}"
    )


def _resolve(address: str, seconds: float) -> list[Any]:
    """Resolve a host name, which may appear in the name service a little after the ranks start.

    Raises:
        ConfigError: it could not be resolved within some seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                reason = error.strerror if isinstance(error, OSError) else "it is not a host name"
                raise ConfigError(
                    f"MASTER_ADDR={address} cannot be resolved: {reason}. All ranks must reach rank"
                    " 0 at this address."
                ) from None
        time.sleep(1.0)


def _require_local(address: str) -> None:
    """Check that an address leads to this machine, by connecting through it to a listener of this
    process.

    Raises:
        ConfigError: it does not lead to this machine.
    """
    try:
        found = _resolve(address, 0.0)
    except ConfigError as error:
        raise ConfigError(f"{error} {_LOCAL}") from None
    for family, *_, target in found:
        with socket.socket(family) as listener, socket.socket(family) as client:
            client.settimeout(_REACH_SECONDS)
            with contextlib.suppress(OSError):
                listener.bind(("::" if family == socket.AF_INET6 else "", 0))
                listener.listen()
                client.connect((target[0], listener.getsockname()[1], *target[2:]))
                return
    raise ConfigError(f"MASTER_ADDR={address} does not lead to this machine. {_LOCAL}")
