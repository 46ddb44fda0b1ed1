"""`lightning-3d launch torchrun`: start the ranks of one node with torchrun; the command is the
same on every node."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping

from lightning_3d.app.launchers.options import TorchrunOptions
from lightning_3d.app.launchers.target import LaunchTarget
from lightning_3d.errors import ConfigError

PORT = 29500


def torchrun_command(
    target: LaunchTarget,
    python: str,
    *,
    endpoint: str | None,
    run: str,
    address: str | None = None,
    restarts: int = 0,
    meeting: Mapping[str, object] | None = None,
    folder: str | None = None,
) -> list[str]:
    """Build the command of the process that starts the ranks of a node.

    Args:
        endpoint: HOST:PORT where the nodes meet; None for a single node.
        run: id of the rendezvous.
        address: address of this node for the others; None: its host name.
        restarts: number of times that all ranks are restarted after a failure.
        meeting: settings of the c10d rendezvous.
        folder: see `LaunchTarget.arguments`.
    """
    options = [
        f"--nnodes={target.nodes}",
        f"--nproc-per-node={target.ranks_per_node}",
        f"--max-restarts={restarts}",
    ]
    if endpoint is None:
        options.append("--standalone")
    else:
        options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run}"]
    if address is not None:
        options.append(f"--local-addr={address}")
    if meeting:
        options.append(
            "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in meeting.items())
        )
    return [
        python,
        "-m",
        "torch.distributed.run",
        *options,
        "-m",
        "lightning_3d",
        *target.arguments(folder),
    ]


def command_of(target: LaunchTarget, options: TorchrunOptions) -> list[str]:
    """Build the command for each node of the cluster.

    Raises:
        ConfigError: there are several nodes and no endpoint, or the endpoint is not HOST:PORT.
    """
    endpoint = options.endpoint
    meeting: dict[str, object] = {}
    if endpoint is None and target.nodes > 1:
        raise ConfigError(
            f"launch.endpoint must be given for {target.nodes} nodes. Use"
            f" launch.endpoint=HOST:{PORT}, where HOST is a name or address of the first node that"
            " all nodes can reach. Run the same command on every node."
        )
    if endpoint is not None:
        host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", str(PORT))
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"launch.endpoint must be HOST:PORT, for example node1:{PORT}; got {endpoint!r}."
            )
        endpoint = f"{host}:{port}"
        # torchrun compares the endpoint with this machine's name, which may mean another address
        if options.address == host:
            meeting["is_host"] = 1
    command = torchrun_command(
        target,
        options.python or sys.executable,
        endpoint=endpoint,
        run=options.name or target.name,
        address=options.address,
        restarts=options.restarts,
        meeting=meeting,
    )
    return (
        ["env", *(f"{name}={value}" for name, value in options.env.items()), *command]
        if options.env
        else command
    )


def render(target: LaunchTarget, options: TorchrunOptions) -> str:
    """Write the command as a line of shell."""
    return f"{shlex.join(command_of(target, options))}\n"


def submit(target: LaunchTarget, options: TorchrunOptions) -> int:
    """Replace this process by torchrun."""
    command = command_of(target, options)
    sys.stdout.flush()
    os.execvp(command[0], command)
