"""Group `cluster`: the machines of a run and their rates, as vendors state them. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from lightning_3d.errors import ConfigError
from lightning_3d.layout.sizes import check_number, check_sizes

ACCELERATORS = ("auto", "cpu", "gpu")


@dataclass(frozen=True)
class PeakFlops:
    """Peak rate of one GPU in matrix products without sparsity, in operations a second, by the type
    of the factors. None: no such products, or not stated by the vendor.
    """

    fp32: float | None = None
    tf32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None


@dataclass(frozen=True)
class Link:
    """Link between GPUs.

    Attributes:
        bandwidth: bytes per second in each direction.
        latency: seconds that an empty message takes to the next GPU. None means unknown.
    """

    bandwidth: float | None = None
    latency: float | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """Group `cluster`. None means unknown.

    Attributes:
        name: name in messages and reports.
        nodes: number of machines.
        gpus_per_node: GPUs of each node. None uses all of them.
        accelerator: auto, gpu or cpu. auto uses GPUs if there is one for each rank.
        gpu: name of the GPU, as its vendor writes it.
        memory: memory of one GPU, in bytes.
        memory_bandwidth: memory bandwidth of one GPU, in bytes per second.
        nvlink_gpus: number of GPUs that NVLink connects, also across nodes.
        peak_flops: operations per second of one GPU in matrix products without sparsity.
        intra_node: link between the GPUs of a node.
        inter_node: link between nodes.
        pod_nodes: number of neighbouring nodes whose ports may all send to each other at their full
            rate. None: all nodes.
        pod_oversubscription: bandwidth of the ports of a pod, divided by the bandwidth that leaves
            the pod.
    """

    name: str = "local"
    nodes: int = 1
    gpus_per_node: int | None = None
    accelerator: str = "auto"
    gpu: str | None = None
    memory: float | None = None
    memory_bandwidth: float | None = None
    nvlink_gpus: int | None = None
    peak_flops: PeakFlops = field(default_factory=PeakFlops)
    intra_node: Link = field(default_factory=Link)
    inter_node: Link = field(default_factory=Link)
    pod_nodes: int | None = None
    pod_oversubscription: float | None = None

    @property
    def lacks_fp8(self) -> bool:
        """True if the GPUs are known to have no float8 matrix products."""
        return self.peak_flops.bf16 is not None and self.peak_flops.fp8 is None

    def check(self) -> None:
        """Refuse numbers that no machine has.

        Raises:
            ConfigError: with the key.
        """
        if self.accelerator not in ACCELERATORS:
            raise ConfigError(
                f"cluster.accelerator must be auto, cpu or gpu; got {self.accelerator!r}."
            )
        check_sizes(
            **{
                "cluster.nodes": self.nodes,
                "cluster.nvlink_gpus": self.nvlink_gpus,
                "cluster.pod_nodes": self.pod_nodes,
            }
        )
        self._check_pods()
        if self.gpus_per_node or self.accelerator == "gpu":  # 0: a node of CPU cores
            check_sizes(**{"cluster.gpus_per_node": self.gpus_per_node})
        rates = {"memory": self.memory, "memory_bandwidth": self.memory_bandwidth}
        rates |= {
            f"peak_flops.{kind.name}": getattr(self.peak_flops, kind.name)
            for kind in fields(PeakFlops)
        }
        rates |= {
            "intra_node.bandwidth": self.intra_node.bandwidth,
            "inter_node.bandwidth": self.inter_node.bandwidth,
        }
        for name, rate in rates.items():
            if rate is not None:
                check_number(f"cluster.{name}", rate, least=1)
        for name, link in (("intra_node", self.intra_node), ("inter_node", self.inter_node)):
            if link.latency is not None:
                check_number(f"cluster.{name}.latency", link.latency, least=0)

    def _check_pods(self) -> None:
        if (self.pod_nodes is None) != (self.pod_oversubscription is None):
            missing = "pod_oversubscription" if self.pod_oversubscription is None else "pod_nodes"
            raise ConfigError(
                f"cluster.{missing} is missing. Set both cluster.pod_nodes, the nodes of a pod, and"
                " cluster.pod_oversubscription, the bandwidth of their ports divided by the"
                " bandwidth that leaves the pod; for example 16 and 2."
            )
        if self.pod_oversubscription is not None:
            check_number("cluster.pod_oversubscription", self.pod_oversubscription, least=1)
