"""A real SLURM of two virtual nodes on this machine: munged, slurmctld and two slurmd of Debian's
`slurm-wlm`, in one folder.

The nodes are called 127.0.0.1 and 127.0.0.2, so that their names are addresses. Everything is ended
and the folder can be removed when the `with` block is left; what runs on this machine already is
not touched.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from command_line import environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "scontrol")
NODES = ("127.0.0.1", "127.0.0.2")
INSTALL = "LIGHTNING_3D_INSTALL_SLURM"
"""Set to 1 to let the tests install Debian's packages."""


def why_not() -> str | None:
    """Why there can be no such cluster here; None where there can. Installs the packages where the
    environment asks for it."""
    if os.geteuid() != 0:
        return "a SLURM of its own needs root"
    if missing() and os.environ.get(INSTALL) == "1" and shutil.which("apt-get"):
        for words in (
            ["update"],
            ["install", "-y", "--no-install-recommends", "slurm-wlm", "munge"],
        ):
            subprocess.run(["apt-get", "-q", *words], check=False, capture_output=True, timeout=600)
    if missing():
        return (
            f"{', '.join(missing())} not installed; {INSTALL}=1 lets the tests install Debian's"
            " slurm-wlm and munge"
        )
    return None


def missing() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class Slurm:
    """A running cluster.

    Attributes:
        variables: the environment in which its commands find it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = environment(SLURM_CONF=str(folder / "slurm.conf"), PATH=_path())

    def run(
        self, *command: str, cwd: Path, timeout: float = 400, text: str | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with everything that it prints as `stdout`."""
        return subprocess.run(
            command,
            cwd=cwd,
            env=self.variables | more,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout,
        )

    def state(self, job: str) -> dict[str, str]:
        """What scontrol says of a job, by name."""
        words = self.run("scontrol", "show", "job", job, cwd=self.folder).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, seconds: float = 400) -> dict[str, str]:
        """Until a job has ended."""
        wait_until(
            lambda: (
                self.state(job).get("JobState")
                not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
            ),
            seconds,
        )
        return self.state(job)


def wait_until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s")
        time.sleep(0.3)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Start the daemons, wait until both nodes are idle, and end them."""
    slurm = Slurm(folder)
    _configure(folder)
    commands = [
        _munged(folder),
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", node] for node in NODES),
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            log = (folder / f"{len(daemons)}_{command[0]}.out").open("wb")
            daemons.append(
                subprocess.Popen(
                    command, env=slurm.variables, stdout=log, stderr=log, start_new_session=True
                )
            )
            if command[0] == "munged":
                wait_until(lambda: (folder / "munge.socket").exists(), 30)
        wait_until(
            lambda: (
                slurm.run("sinfo", "-h", "-t", "idle", "-o", "%D", cwd=folder).stdout.strip()
                == str(len(NODES))
            ),
            60,
        )
        yield slurm
    finally:
        # the daemons end in any case
        with contextlib.suppress(TimeoutError, OSError, subprocess.TimeoutExpired):
            if len(daemons) > 1:
                slurm.run("scancel", "-u", "root", cwd=Path("/"), timeout=60)
                wait_until(
                    lambda: slurm.run("squeue", "-h", cwd=Path("/")).stdout.strip() == "", 60
                )
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _munged(folder: Path) -> list[str]:
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    places = {
        "key-file": "key",
        "socket": "socket",
        "pid-file": "pid",
        "log-file": "log",
        "seed-file": "seed",
    }
    return [
        "munged",
        "--foreground",
        "--force",
        *(f"--{option}={folder}/munge.{end}" for option, end in places.items()),
    ]


def _configure(folder: Path) -> None:
    ports = [_free_port() for _ in range(1 + len(NODES))]
    lines = [
        "ClusterName=virtual",
        f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.socket",
        "CredType=cred/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool.%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd.%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "KillWait=30",
        "MinJobAge=3600",
        # ranks meet at a port made of the job's number, also those of other sessions
        f"FirstJobId={1000 + os.getpid() % 8000}",
        *(
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr={name} Port={port}"
            " CPUs=8 RealMemory=8000 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        ),
        f"PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP",
    ]
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])
