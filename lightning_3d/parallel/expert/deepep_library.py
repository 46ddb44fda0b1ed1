"""The package `deep_ep`: whether it is there, has the interface that is used here, and buffers for a group of ranks.

Its class `Buffer` was read in versions 1.2.1 and 2.1.0 (https://github.com/deepseek-ai/DeepEP). The latter has a newer class, too, which
is not used.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from lightning_3d.config.options.experts import ExpertOptions
from lightning_3d.config.options.token_exchange import (
    NVLINK_RANKS,
    PACKAGE,
    VERSIONS,
    check_deepep_library,
    check_deepep_sizes,
    deepep_refused,
)
from lightning_3d.layout.layout import Layout

_FIRST, _BEFORE = (1, 2, 1), (2, 2, 0)
"""`VERSIONS`, as numbers."""

INTERFACE = {
    "__init__": ("group", "num_nvl_bytes", "num_rdma_bytes"),
    "get_dispatch_layout": ("topk_idx", "num_experts"),
    "dispatch": (
        "x",
        "handle",
        "num_tokens_per_rank",
        "num_tokens_per_rdma_rank",
        "is_token_in_rank",
        "num_tokens_per_expert",
        "topk_idx",
        "topk_weights",
        "async_finish",
    ),
    "combine": ("x", "handle", "topk_weights", "async_finish"),
    "get_dispatch_config": ("num_ranks",),
    "get_combine_config": ("num_ranks",),
}
"""Methods of `deep_ep.Buffer` that are called here, with their arguments."""


def require_exchange(options: ExpertOptions, layout: Layout, node_size: int | None, device: torch.device, precision: str) -> None:
    """Refuse a run whose tokens cannot travel as its options say, before its ranks meet.

    Args:
        node_size: ranks of each node; None for one node.
        precision: name in `PRECISIONS`.

    Raises:
        ConfigError: DeepEP is asked for and cannot run, or is not installed.
    """
    if options.uses_deepep:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        options.check_run(layout, node_size, device.type, precision, capability)
        check_deepep_library()


class DeepEP:
    """DeepEP between the ranks that share the experts of a stage. All of them make their buffers when the first tokens are sent.

    Args:
        group: the ranks.

    Raises:
        ConfigError: the package is not there, or has another interface; or torch fills new memory, which DeepEP 2 refuses.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        if torch.are_deterministic_algorithms_enabled() and fills:
            raise deepep_refused(
                "cannot run while torch fills new memory, as it does with deterministic algorithms; set"
                " torch.utils.deterministic.fill_uninitialized_memory = False"
            )
        self._package, self._group = _load(), group
        self._buffer: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepEP:
        """A copied model sends through the same buffers."""
        return self

    @property
    def index_type(self) -> torch.dtype:
        """Type of the numbers of experts."""
        index_type: torch.dtype = getattr(self._package, "topk_idx_t", torch.int64)
        return index_type

    def buffer(self, hidden: int, experts: int, choices: int) -> Any:
        """Return the `deep_ep.Buffer` for tokens of width `hidden`, each with `choices` of the `experts`.

        Communicates at the first call, between the ranks of the group.

        Raises:
            ConfigError: the buffers cannot be made, or are too small for such tokens.
        """
        if self._buffer is None:
            check_deepep_sizes(dist.get_world_size(self._group), hidden, experts, choices)
            self._buffer = self._make_buffer(hidden)
            self._width = hidden
        if hidden > self._width:
            raise deepep_refused(f"sends hidden states of one width, but a mixture has {hidden} and an earlier one {self._width}")
        return self._buffer

    def _make_buffer(self, hidden: int) -> Any:
        kind, ranks = self._package.Buffer, dist.get_world_size(self._group)
        width = hidden * torch.bfloat16.itemsize
        try:
            configs = kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)
            nvlink = max(config.get_nvl_buffer_size_hint(width, ranks) for config in configs)
            rdma = max(config.get_rdma_buffer_size_hint(width, ranks) for config in configs) if ranks > NVLINK_RANKS else 0
            return kind(self._group, nvlink, rdma)
        except (AssertionError, ImportError, RuntimeError) as error:  # no NVLink, built without NVSHMEM, ...
            raise deepep_refused(f"cannot make its buffers between {ranks} ranks ({_first_line(error)})") from error


def _load() -> Any:
    """Import `deep_ep` and check its interface.

    Raises:
        ConfigError: it cannot be imported, or does not have the interface.
    """
    wanted = f"needs {PACKAGE} {VERSIONS}"
    try:
        package = import_module(PACKAGE)
    except Exception as error:  # it asserts that it finds the libraries that it was built for
        raise deepep_refused(f"{wanted}, but importing it fails ({_first_line(error)})") from error
    version = _version(package)
    numbers = tuple(map(int, re.findall(r"\d+", version or "")[:3]))
    if numbers and not _FIRST <= numbers < _BEFORE:
        raise deepep_refused(f"{wanted}; version {version} is installed")
    for method, arguments in INTERFACE.items():
        lacking = _lacking(getattr(getattr(package, "Buffer", None), method, None), arguments)
        if lacking is not None:
            raise deepep_refused(f"{wanted}; in {f'version {version}' if version else 'the installed package'} Buffer.{method} {lacking}")
    return package


def _version(package: Any) -> str | None:
    """Return the version of the package; None if it says none, as in a folder where it was built."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return getattr(package, "__version__", None)


def _lacking(method: Any, arguments: tuple[str, ...]) -> str | None:
    """Return what a method of `Buffer` lacks, for a message; None if it has all these arguments."""
    if method is None:
        return "is missing"
    known = inspect.signature(method).parameters
    missing = [name for name in arguments if name not in known]
    return f"has no argument {missing[0]}" if missing else None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
