"""Ways in which tokens travel to their experts, and what DeepEP needs for it. Pure: no torch.

The limits are those of the kernels of DeepEP 1.2.1 and 2.1 (`csrc/kernels/launch.cuh`, `intranode.cu` and `internode.cu`).
"""

from __future__ import annotations

import importlib.util

from lightning_3d.errors import ConfigError, did_you_mean, listed
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.node_ranks import by_node

ALL_TO_ALL, DEEPEP = "all_to_all", "deepep"
EXCHANGES = (ALL_TO_ALL, DEEPEP)

PACKAGE, VERSIONS = "deep_ep", "1.2.1 to 2.1"
"""The package that has DeepEP, and the versions whose `Buffer` was read."""

RANKS = (2, 4, 8, 16, 32, 64)
"""Numbers of ranks between which the kernels of all these versions can send. More than 64 limit the nodes of a token to 8."""

NVLINK_RANKS = 8
"""Ranks of a node; more ranks take `RANKS / NVLINK_RANKS` nodes."""

CAPABILITY = (9, 0)
"""The first compute capability that DeepEP supports with all features: Hopper."""

MOST_CHOICES = 32
"""The largest number of experts of a token."""

MOST_EXPERTS = 128
"""The largest number of experts of a rank."""


def deepep_refused(why: str) -> ConfigError:
    """Return the error for what DeepEP cannot do."""
    return ConfigError(f"moe_exchange=deepep {why}. Use moe_exchange=all_to_all.")


def check_exchange(name: str) -> str:
    """Return `name`; raise ConfigError if it is not one of `EXCHANGES`."""
    if name not in EXCHANGES:
        raise ConfigError(f'moe_exchange must be {listed(EXCHANGES, last="or")}; got "{name}".{did_you_mean(str(name), EXCHANGES)}')
    return name


def check_node_size(layout: Layout, size: int) -> None:
    """Refuse a `moe_node_size` that puts more ranks of a group that shares experts on one node than on another.

    Args:
        size: ranks of a node, which are filled in order.
    """
    if _splits_evenly(layout, size):
        return
    near = [next(n for n in way if _splits_evenly(layout, n)) for way in (range(size, 0, -1), range(size, layout.world_size + 1))]
    raise ConfigError(
        f"moe_node_size={size} puts the {layout.ep} ranks that share experts in the layout {layout} unevenly on nodes. The nearest sizes"
        f" that work are {near[0]} and {near[1]}."
    )


def _splits_evenly(layout: Layout, size: int) -> bool:
    """Whether each group of ranks that share experts has equally many ranks on each of its nodes."""
    return all(len({rank // size for rank in group}) == 1 or by_node(group, size) != [] for group in layout.expert_groups())


def check_deepep_ranks(layout: Layout, node_size: int | None) -> None:
    """Refuse a layout whose experts are on a number of ranks, or on ranks of nodes, between which DeepEP cannot send.

    Args:
        node_size: ranks of each node; None for one node.
    """
    if layout.ep not in RANKS:
        known = listed([str(ranks) for ranks in RANKS], last="or")
        raise deepep_refused(f"works with ep {known}, but the layout {layout} has ep {layout.ep}")
    for group in layout.expert_groups() if node_size is not None else ():
        for first in range(0, layout.ep, NVLINK_RANKS):
            part = group[first : first + NVLINK_RANKS]
            nodes = {rank // node_size for rank in part}  # type: ignore[operator]
            if len(nodes) > 1:
                raise deepep_refused(
                    f"needs each {len(part)} consecutive ranks of the {layout.ep} that share experts on one node, but ranks"
                    f" {listed([str(rank) for rank in part])} are on {len(nodes)} nodes of {node_size} ranks"
                )


def check_deepep_machine(device: str, precision: str, capability: tuple[int, int] | None) -> None:
    """Refuse a device or a precision that DeepEP does not have.

    Args:
        device: kind of device; "gpu" and "cuda" are GPUs.
        precision: name in `PRECISIONS`.
        capability: compute capability of the GPU; None if it is unknown.
    """
    if device not in ("gpu", "cuda"):
        raise deepep_refused(f"needs NVIDIA GPUs, but this run is on the {device.upper()}")
    if precision not in ("bf16", "fp8"):
        raise deepep_refused(f"sends hidden states in bf16, but they have another type with precision={precision}; precision=bf16 works")
    if capability is not None and capability < CAPABILITY:
        least, found = (".".join(map(str, numbers)) for numbers in (CAPABILITY, capability))
        raise deepep_refused(f"needs GPUs of compute capability {least} or higher, such as H100; the GPUs of this machine have {found}")


def check_deepep_library() -> None:
    """Refuse DeepEP if it is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise deepep_refused(f"needs the package {PACKAGE} {VERSIONS}, which is not installed (docs/experts.md says how to install it)")


def check_deepep_sizes(ranks: int, hidden: int | None, experts: int | None, choices: int | None) -> None:
    """Refuse tokens that the kernels cannot send. A size that is None is unknown and not checked.

    Args:
        ranks: ranks that share the experts.
        hidden: width of the hidden states.
        experts: number of all experts.
        choices: experts of each token.
    """
    unit, most = (16, 8176) if ranks <= NVLINK_RANKS else (256, 7936)
    if hidden is not None and (hidden % unit or hidden > most):
        raise deepep_refused(
            f"with ep {ranks} sends hidden states whose width is a multiple of {unit} and at most {most}, but the model's is {hidden}"
        )
    if experts is not None and experts % ranks:
        raise deepep_refused(f"needs equally many experts on each rank, but ep {ranks} does not divide the model's {experts} experts")
    if experts is not None and experts // ranks > MOST_EXPERTS:
        raise deepep_refused(
            f"works with at most {MOST_EXPERTS} experts on a rank, but the model's {experts} experts with ep {ranks} are"
            f" {experts // ranks} on each"
        )
    if choices is not None and choices > MOST_CHOICES:
        raise deepep_refused(f"sends a token to at most {MOST_CHOICES} experts, but the model chooses {choices}")
