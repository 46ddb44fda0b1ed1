"""Resources that a run asks SLURM for, however it is submitted. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SlurmRequest:
    """Resources that a run requests from SLURM in addition to nodes, tasks and GPUs, which its
    cluster states. None: the site's default.

    Attributes:
        partition: partition of SLURM.
        account: account that is charged.
        qos: quality of service.
        memory: memory of each node in SLURM's notation, such as 500G. 0 is all memory of the node.
        cpus_per_task: CPU cores for each rank.
        setup: shell lines that run once, on the first node, before the ranks start, such as
            ["module load cuda"].
        srun: further options of srun, each as "--option=value".
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    memory: str | None = None
    cpus_per_task: int | None = None
    setup: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)

    def srun_options(self) -> list[str]:
        """Options of srun: it takes the number of tasks and nodes from the job, but since SLURM
        22.05 not the cores of a task."""
        cores = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task is not None else []
        return [*cores, *self.srun]
