"""torchrun on two nodes: two network namespaces of this machine, joined by a cable, that see one
disk."""

import csv
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import environment, run_commands
from quick_runs import QUICK

FOUR = "tp2_dp2"
PORT = 29500


@dataclass(frozen=True)
class Node:
    """A network namespace with one end of the cable."""

    name: str
    interface: str
    address: str

    def start(self, command: list[str], folder: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            cwd=folder,
            env=environment(GLOO_SOCKET_IFNAME=self.interface),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two nodes are network namespaces, which need `ip` and root")
    own = os.getpid()
    pair = [Node(f"l3d-{own}-{end}", f"l3d{own}{end}"[-15:], f"10.231.77.{end}") for end in (1, 2)]
    try:
        try:
            for node in pair:
                ip("netns", "add", node.name)
            ip(
                "link",
                "add",
                pair[0].interface,
                "netns",
                pair[0].name,
                "type",
                "veth",
                "peer",
                pair[1].interface,
                "netns",
                pair[1].name,
            )
            for node in pair:
                ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", node.interface)
                ip("-n", node.name, "link", "set", node.interface, "up")
                ip("-n", node.name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"this machine lets nobody make network namespaces: {error}")
        yield pair
    finally:
        for node in pair:
            subprocess.run(["ip", "netns", "delete", node.name], capture_output=True, check=False)


def run_of(layout: str) -> list[str]:
    return [
        f"parallelism={layout}",
        "parallelism.micro_batch_size=2",
        "cluster=local_cpu",
        *QUICK[2:],
        "trainer.max_steps=4",
    ]


def launch(
    nodes: list[Node], folder: Path, *overrides: str, layout: str = FOUR, restarts: int = 0
) -> list[tuple[int, str]]:
    """(exit code, output) of `lightning-3d launch torchrun` on each node."""
    command = [
        sys.executable,
        "-m",
        "lightning_3d",
        "launch",
        "torchrun",
        *run_of(layout),
        "cluster.nodes=2",
        *overrides,
    ]
    options = [f"launch.endpoint={nodes[0].address}:{PORT}", f"launch.restarts={restarts}"]
    processes = [
        node.start([*command, *options, f"launch.address={node.address}"], folder) for node in nodes
    ]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, output) for process, output in zip(processes, outputs, strict=True)
    ]


def rows(folder: Path) -> list[dict[str, str]]:
    """Of the one run below a folder."""
    (run,) = (folder / "outputs").glob("*/*")
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def losses(folder: Path) -> list[float]:
    return [float(row["loss"]) for row in rows(folder)]


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Losses of the same layout, whose ranks this machine starts."""

    @functools.cache
    def run(layout: str) -> list[float]:
        folder = tmp_path_factory.mktemp("one")
        [done] = run_commands(
            [["train", *run_of(layout), f"hydra.run.dir={folder}/outputs/one/run"]],
            timeout=300,
            warm=True,
        )
        assert done.code == 0, done.output
        return losses(folder)

    return run


# six fresh interpreters for two ranks; test_cli.py has torchrun on one node
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("layout", "ranks"), [("dp2", 2), (FOUR, 4)])
def test_two_nodes_train_as_one(
    layout: str,
    ranks: int,
    nodes: list[Node],
    tmp_path: Path,
    on_one_node: Callable[[str], list[float]],
) -> None:
    results = launch(nodes, tmp_path, layout=layout)
    assert [code for code, _ in results] == [0, 0], results
    assert losses(tmp_path) == pytest.approx(on_one_node(layout), rel=1e-6)
    told = "".join(output for _, output in results)
    assert told.count("run folder: ") == 1 and told.count(f"{ranks} ranks on CPU") == 1


FAULTY = [
    "+callbacks.faulty._target_=faulty.FailAtStep",
    "+callbacks.faulty.rank=3",
    "+callbacks.faulty.step=2",
]


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_rank_that_fails_ends_both_nodes(nodes: list[Node], tmp_path: Path, how: str) -> None:
    started = time.monotonic()
    results = launch(nodes, tmp_path, *FAULTY, f"+callbacks.faulty.how={how}")
    assert all(code == 1 for code, _ in results), results
    assert time.monotonic() - started < 300, "FailAtStep hangs for ten minutes"
    told = "".join(output for _, output in results)
    assert told.count("lightning_3d: rank ") == 1, told
    if how == "hang":
        assert told.count("ArithmeticError: rank 3 cannot go on") == 1, told


@pytest.mark.parametrize("every", [1, 4])
def test_restart_goes_on_in_the_same_folder(
    nodes: list[Node], tmp_path: Path, on_one_node: Callable[[str], list[float]], every: int
) -> None:
    """From the newest checkpoint; from the beginning where there is none."""
    saving = [f"trainer.checkpoint_every_n_steps={every}", "+callbacks.faulty.once=true"]
    results = launch(nodes, tmp_path, *FAULTY, *saving, restarts=1)
    assert [code for code, _ in results] == [0, 0], results
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3", "4"]
    assert losses(tmp_path) == pytest.approx(on_one_node(FOUR), rel=1e-5)
    told = "".join(output for _, output in results)
    assert told.count("resuming from ") == (every == 1), told
