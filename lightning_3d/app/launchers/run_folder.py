"""Run folder of a job whose nodes are lost when it ends or restarts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from lightning_3d.app.launchers.target import LaunchTarget
from lightning_3d.errors import ConfigError


def folder_in_a_volume(
    target: LaunchTarget, volumes: Mapping[str, str], name: str, *, inside: str
) -> str:
    """Choose the run folder: in a volume, where all nodes see it, also restarted ones.

    Args:
        volumes: names of volumes, each with its path on the nodes.
        name: name of the job, which the folder gets in the first volume unless the user names a
            folder.
        inside: what the folder would be lost with, for example "the pod".

    Raises:
        ConfigError: a path is not absolute, or the folder is not in a volume.
    """
    for volume, path in volumes.items():
        if not path.startswith("/") or ":" in path:
            raise ConfigError(
                f"The path of {volume} in launch.volumes must be absolute, for example"
                f" /mnt/{volume}; got {path!r}."
            )
    folder = target.folder or next(
        (f"{path.rstrip('/')}/{name}" for path in volumes.values()), None
    )
    if folder is not None and any(
        PurePosixPath(folder).is_relative_to(path) for path in volumes.values()
    ):
        return folder
    where = (
        f"{folder} is not in a volume"
        if folder is not None
        else f"would be inside {inside} and would be lost with it"
    )
    raise ConfigError(
        f"The run folder {where}. All nodes write checkpoints there, so it must be in a shared"
        " volume: "
        + (
            "launch.volumes={NAME: /mnt/runs}"
            if not volumes
            else f"hydra.run.dir={[*volumes.values()][0]}/NAME"
        )
        + "."
    )
