"""Shell script that starts torchrun on a rented machine: the same on every node, which a service
numbers and whose addresses it lists."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_3d.app.launchers.options import CloudOptions
from lightning_3d.app.launchers.run_folder import folder_in_a_volume
from lightning_3d.app.launchers.target import LaunchTarget
from lightning_3d.app.launchers.torchrun import torchrun_command
from lightning_3d.errors import ConfigError

_OURS = ("--rdzv-endpoint=", "--rdzv-conf=", "--local-addr=")  # words with variables of the script


@dataclass(frozen=True)
class NodeVariables:
    """Names of the environment variables that a service sets on each node.

    Attributes:
        rank: number of the node, from 0.
        addresses: addresses of all nodes, one on each line, in the order of their numbers.
    """

    rank: str
    addresses: str


def node_script(
    target: LaunchTarget,
    options: CloudOptions,
    variables: NodeVariables,
    *,
    name: str,
    folder: str,
    setup: Sequence[str] = (),
    restarts: int,
) -> str:
    """Write the script. It needs only a POSIX shell and sed.

    Args:
        folder: run folder.
        setup: lines before the ranks start.
        restarts: number of times that torchrun restarts the ranks on the same nodes.
    """
    address, meeting = None, None
    lines = ["set -eu", *setup]
    if target.nodes > 1:
        lines += [
            f'MASTER=$(printf "%s\\n" "${variables.addresses}" | sed -n 1p)',
            (
                f'ADDRESS=$(printf "%s\\n" "${variables.addresses}" | sed -n "$(({variables.rank} +'
                ' 1))p")'
            ),
        ]
        address = "$ADDRESS"
        meeting = {
            "read_timeout": options.patience,
            "join_timeout": options.patience,
            "is_host": f"$(({variables.rank} == 0))",
        }
    command = torchrun_command(
        target,
        options.python,
        endpoint=f"$MASTER:{options.port}" if target.nodes > 1 else None,
        run=name,
        address=address,
        restarts=restarts,
        meeting=meeting,
        folder=folder,
    )
    return (
        "\n".join(
            [
                *lines,
                " ".join(
                    f'"{word}"' if word.startswith(_OURS) else shlex.quote(word) for word in command
                ),
            ]
        )
        + "\n"
    )


def run_folder(
    target: LaunchTarget, volumes: Mapping[str, str], name: str, *, nodes_have_others: bool
) -> str:
    """Choose the run folder: in a volume, or the user's, where machines may have shared file
    systems of their own."""
    if target.folder is not None and target.folder.startswith("/") and nodes_have_others:
        return target.folder
    return folder_in_a_volume(target, volumes, name, inside="the machine")


def gpu_of(
    target: LaunchTarget, chosen: str | None, known: Mapping[str, str], example: str
) -> str | None:
    """Choose the name of the GPU in a catalog. None: the nodes have no GPUs.

    Args:
        known: names in the catalog of the GPUs of our clusters.

    Raises:
        ConfigError: the GPU of the cluster is not known.
    """
    if not target.gpus_per_node:
        return None
    found = chosen or known.get(target.gpu or "")
    if found is None:
        gpu = target.gpu or "cluster.gpu=null"
        raise ConfigError(
            f"launch.gpu must be given, because the name of {gpu} in the catalog is not known, for"
            f" example {example}."
        )
    return found


def check_lists(options: CloudOptions, key: str) -> None:
    """Refuse environment variables, secrets and further options that the file or the command line
    cannot hold.

    Args:
        key: option with further options of the program.
    """
    for name in (*options.env, *options.secrets):
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(
                "launch.env and launch.secrets must name environment variables: letters, digits"
                f" and underscores; got {name!r}."
            )
    if both := sorted(set(options.env) & set(options.secrets)):
        raise ConfigError(
            f"{both[0]} is in launch.env and in launch.secrets. Leave it in one of them."
        )
    for line in getattr(options, key):
        if not line.startswith("-"):
            raise ConfigError(
                f'launch.{key} must be a list of options, for example ["--yes"]; got {line!r}.'
            )
