"""A check: what a rank measures, and what rank 0 judges. The checks themselves are in files of
their own, listed in `checks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_3d.app.config.cluster import ClusterConfig
from lightning_3d.app.doctor.board import DoctorBoard
from lightning_3d.app.doctor.findings import DoctorFinding, RankPlaces
from lightning_3d.layout.layout import Layout

Facts = dict[str, Any]
"""What a rank measured: values of JSON."""


@dataclass(frozen=True)
class Setup:
    """What is examined.

    Attributes:
        layout: layout whose groups are measured.
        accelerator: cpu or gpu.
        cluster: what the cluster promises.
        folder: folder in which runs are written, on a file system that all ranks share.
        limit: seconds for each check.
    """

    layout: Layout
    accelerator: str
    cluster: ClusterConfig
    folder: str
    limit: float


@dataclass
class Room:
    """A rank while it measures.

    Attributes:
        setup: what is examined.
        rank: global rank.
        world_size: number of ranks.
        local_rank: number of the rank on its host.
        board: board for checks whose ranks talk to each other.
        leaders: lowest rank of each host that answered.
        present: ranks that take part in the check.
        now: what the rank is doing, for the case that it hangs.
    """

    setup: Setup
    rank: int
    world_size: int
    local_rank: int
    board: DoctorBoard
    leaders: list[int] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    now: str = ""

    @property
    def is_leader(self) -> bool:
        """True if this rank is the lowest one of its host."""
        return self.rank in self.leaders

    def device(self) -> Any:
        """Return this rank's device, and make it the current one of the calling thread."""
        import torch

        if self.setup.accelerator != "gpu":
            return torch.device("cpu")
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def wait(self) -> None:
        """Wait for the work of this rank's device."""
        if self.setup.accelerator == "gpu":
            import torch

            torch.cuda.synchronize()

    @cached_property
    def mesh(self) -> Any:
        """The process groups of the layout, all of them in use. Collective over the world."""
        import torch.distributed as dist

        from lightning_3d.parallel.mesh import Mesh

        self.now = "connecting the process groups"
        self.device()
        backend = "nccl" if self.setup.accelerator == "gpu" else "gloo"
        store = self.board.second_connection(self.rank, self.setup.limit)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size)
        mesh = Mesh(self.setup.layout)
        mesh.warm_up()
        return mesh


@dataclass(frozen=True)
class GatheredAnswers:
    """What rank 0 judges.

    Attributes:
        setup: what is examined.
        places: hosts of the ranks.
        facts: facts of this check by rank, of the ranks that answered.
        earlier: facts of earlier checks, by name.
    """

    setup: Setup
    places: RankPlaces
    facts: Mapping[int, Facts]
    earlier: Mapping[str, Mapping[int, Facts]] = field(default_factory=dict)

    def values(self, name: str) -> dict[int, Any]:
        """Return one fact by rank."""
        return {rank: facts.get(name) for rank, facts in self.facts.items()}

    def of_hosts(self) -> dict[int, Facts]:
        """Return the facts of the lowest rank of each host."""
        return {rank: self.facts[rank] for rank in self.places.leaders() if rank in self.facts}


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: heading of its findings.
        measure: function that every rank runs.
        judge: function from the facts of all ranks to findings; pure.
        together: whether its ranks wait for each other, so that it needs all of them.
    """

    name: str
    measure: Callable[[Room], Facts]
    judge: Callable[[GatheredAnswers], Sequence[DoctorFinding]]
    together: bool = False
