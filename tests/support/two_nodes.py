"""Two nodes on one machine: network namespaces with host names of their own, whose network can be
cut. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")


class TwoNodes:
    """Nodes 0 and 1, with `ADDRESSES`, at two ports of a switch.

    Attributes:
        hosts: the file with the addresses of host names that each node sees.
        names: host names.
    """

    def __init__(self, name: str, hosts: Path) -> None:
        self.name, self.hosts, self.names = name, [hosts, hosts], ["node0", "node1"]
        self.spaces = (f"{name}a", f"{name}b")

    def start(
        self,
        node: int,
        command: Sequence[str],
        folder: Path,
        env: dict[str, str],
        log: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a node, which leads a process group. Its output is added to `log`, or
        is read from the process."""
        # in a mount namespace of its own
        named = (
            f"mount --bind {self.hosts[node]} /etc/hosts && hostname {self.names[node]} && exec"
            ' "$@"'
        )
        inside = [
            "ip",
            "netns",
            "exec",
            self.spaces[node],
            "unshare",
            "--uts",
            "sh",
            "-c",
            named,
            "sh",
            *command,
        ]
        environment = env | {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
        with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("a") as output:
            return subprocess.Popen(
                inside,
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill all processes on both nodes: also ranks, which torchrun puts into sessions of their
        own."""
        for space in self.spaces:
            found = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
            ).stdout
            for number in found.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)

    def cut(self) -> None:
        """Cut the network between the nodes. Node 0 sees nothing but silence."""
        ip("-n", f"{self.name}s", "link", "set", "port1", "down")

    def mend(self) -> None:
        ip("-n", f"{self.name}s", "link", "set", "port1", "up")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def available() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    probe = f"l3dprobe{os.getpid()}"
    made = (
        subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode
        == 0
    )
    if made:
        subprocess.run(["ip", "netns", "del", probe], check=False)
    return made


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[TwoNodes]:
    """Make the nodes and their switch; remove them at the end.

    Args:
        folder: folder for a file with their host names.
    """
    hosts = folder / "hosts"
    hosts.write_text(
        "".join(f"{address} node{node}\n" for node, address in enumerate(ADDRESSES))
        + "127.0.0.1 localhost\n"
    )
    name = f"l3d{os.getpid()}"
    switch = f"{name}s"
    nodes = TwoNodes(name, hosts)
    try:
        for space in (switch, *nodes.spaces):
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for number, space in enumerate(nodes.spaces):
            port = f"port{number}"
            ip(
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            ip("-n", switch, "link", "set", port, "master", "switch", "up")
            ip("-n", space, "addr", "add", f"{ADDRESSES[number]}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
        yield nodes
    finally:
        nodes.kill()
        for space in (switch, *nodes.spaces):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
