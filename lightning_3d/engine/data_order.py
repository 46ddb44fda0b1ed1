"""The order of samples of one process, distributed over data-parallel ranks.

Lightning gives the loaders of a distributed strategy a `DistributedSampler`, which shuffles by its
own seed and so in another order than the loader does on one process. Here every rank draws the
order of the loader's own sampler, from random number generators in the state they have on one
process. Data rank r of R reads samples r, r + R, r + 2R, ... of it (an elastic run: whole
micro-batches, see `MicroBatchRows`): global batch k holds the rows of batch k of one process with
the same global batch.
"""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lightning_3d.checkpoint.rng_state import read_generators, set_generators
from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.errors import DataError
from lightning_3d.layout.micro_batch_rows import MicroBatchRows
from lightning_3d.parallel.random_streams import global_seed

_STATE_BYTES = 64 * 1024
_HOST = torch.device("cpu")

DISTRIBUTED = "distributed"
"""Stands for a state: the order of Lightning's DistributedSampler, in which checkpoints without a
state were saved."""


class OneProcessOrder(DistributedSampler[Any]):
    """One data-parallel rank's samples of the order that a sampler gives on one process.

    Where generators differ between ranks when an epoch begins (a data set that draws random numbers
    advances them unequally), all ranks take the state of rank 0. Where they are equal, drawing the
    order advances them as on one process: a sampler that has a generator of its own, or whose
    samples all ranks read, is read no further than the batches need. It may draw more at its end
    (`RandomSampler` does).

    Args:
        sampler: sampler of the user's loader.
        data: data set that the sampler was made for.
        drop_last: whether to drop the last samples; else the first samples are repeated until all
            ranks have equally many.
        device: device of small tensors for collectives.
        seed: seed of the order `DISTRIBUTED`.
        rows: how the rows of the order are dealt to ranks; None deals them one by one.

    Communicates when it is made and in `set_epoch`, which Lightning calls on all ranks, unless the
    sampler is sequential. Iterating does not communicate.

    Attributes:
        checksum: checksum of what was drawn last, equal on all ranks that have read as much of the
            same data; 0 before.

    Raises:
        DataError: the sampler has no length.
    """

    def __init__(
        self,
        sampler: Any,
        data: Any,
        *,
        num_replicas: int,
        rank: int,
        drop_last: bool,
        device: torch.device,
        seed: int,
        rows: MicroBatchRows | None = None,
    ) -> None:
        try:
            length = len(sampler)
        except TypeError:
            raise DataError(
                f"The sampler {type(sampler).__name__} has no __len__, so its samples cannot be"
                " distributed over data-parallel ranks. Add __len__, or set"
                " Trainer(use_distributed_sampler=False) and let the sampler return the samples of"
                " its own rank."
            ) from None
        super().__init__(
            range(length),  # type: ignore[arg-type]
            num_replicas,
            rank,
            shuffle=False,
            seed=seed,
            drop_last=drop_last,
        )
        self.sampler = sampler
        self._rows = rows or MicroBatchRows(num_replicas, num_replicas)
        self.checksum = 0
        self._device = device
        self._data = data
        self._start: str | None = None
        self._resumed_start: str | None = None
        self._own_then: str | None = None
        self._common: dict[str, Any] = {}
        self._after: str | None = None
        self._continues = False
        self._meet()

    @override
    def __iter__(self) -> Iterator[Any]:
        order, ranks = self._order(), self.num_replicas
        first: list[Any] = []
        while rows := list(islice(order, self._rows.together)):
            first = first or list(rows)
            self.checksum = _checksum(rows, self.checksum)
            missing = -len(rows) % ranks
            if missing and self.drop_last:
                rows = rows[: len(rows) // ranks * ranks]
            else:
                rows += islice(cycle(first), missing)
            yield from self._rows.of_rank(self.rank, rows)

    @override
    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._resumed_start = None
        super().set_epoch(epoch)
        if callable(getattr(self.sampler, "set_epoch", None)):
            self.sampler.set_epoch(epoch)
        after = self._after if self._continues else None
        self._continues = False
        self._meet()
        self._after = after

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, so that a resumed epoch has the same order."""
        return {"epoch": self.epoch, "start": self._start, "own": _own_state(self.sampler)}

    def resume(self, state: dict[str, Any]) -> None:
        """Draw the order of epoch `state["epoch"]` from the same random numbers as before; later
        epochs are drawn as usual."""
        self.epoch, self._resumed_start, self._own_then = (
            state["epoch"],
            state["start"],
            state["own"],
        )
        self.restore_own()

    def restore_own(self) -> None:
        """Restore the state that the sampler's own generator had when the checkpoint was saved."""
        if self._own_then is not None:
            _set_own_state(self.sampler, self._own_then)

    def continue_epoch(self) -> None:
        """Expect `set_epoch` of a resumed epoch, in which the order has been drawn already."""
        self._continues = True

    def _meet(self) -> None:
        """Remember the states of rank 0's generators that other ranks do not share."""
        self._common = (
            {}
            if isinstance(self.sampler, SequentialSampler)
            else _unequal_states(_read(self.sampler), self._device)
        )

    def _order(self) -> Iterator[Any]:
        self.checksum = 0
        if isinstance(self.sampler, SequentialSampler):
            return iter(self.sampler)
        if self._resumed_start == DISTRIBUTED:
            return iter(self._distributed_order())
        return self._drawn_order()

    def _drawn_order(self) -> Iterator[Any]:
        """Draw the order of this epoch.

        A loader that is read a second time in an epoch continues from the generators where the
        first reading ended: ranks may have drawn different random numbers since, and a resumed
        epoch must find the same order.
        """
        mine = json.loads(_read(self.sampler))
        first = self._after is None
        again = self._resumed_start if first else self._after
        start = json.loads(again) if again is not None else mine | self._common
        has_own = mine["own"] is not None
        if has_own and not first:
            start["own"] = mine["own"]
        _set(self.sampler, json.dumps(start))
        if first:
            self._start = json.dumps(start)
        samples = iter(self.sampler)
        # What is drawn from generators that others use, too, is drawn now, while they are equal on
        # all ranks.
        lazy = has_own or (self.num_replicas == 1 and again is None and not self._common)
        drawn = list(islice(samples, 1 if lazy else len(self.sampler)))
        self._after = _read(self.sampler)
        after = json.loads(self._after)
        own_again = mine
        if again is None or start == mine:
            own_again = {name: mine[name] for name in mine if mine[name] != start[name]}
        _set(self.sampler, json.dumps(after | own_again | {"own": after["own"]}))
        if lazy:
            return chain(drawn, samples)
        self.checksum = _checksum(drawn)
        return iter(drawn)

    def _distributed_order(self) -> list[Any]:
        """Draw the order that Lightning's samplers would give this epoch."""
        before = _read(self.sampler)
        order = list(self.sampler)
        if _read(self.sampler) == before:
            return order  # nothing random, so it is the same order as before
        _set(self.sampler, before)
        known = isinstance(self.sampler, RandomSampler)
        rank_zero_warn(
            "The checkpoint does not contain the random state that determined the order of samples"
            " in its epoch. "
            + (
                "The rest of this epoch uses the order of Lightning's DistributedSampler. If the"
                " seed is the same, that order is correct for checkpoints of Lightning's DDP and of"
                " old lightning_3d releases."
                if known
                else (
                    f"In this epoch, some samples of {type(self.sampler).__name__} may be read"
                    " twice, and others not at all."
                )
            )
            + " Later epochs have the same order as on one process."
        )
        if not known:
            return order
        return torch.randperm(
            len(self._data), generator=torch.Generator().manual_seed(self.seed + self.epoch)
        ).tolist()


def sampler_maker(
    device: torch.device, resumed: Callable[[], dict[str, Any] | None], rows: MicroBatchRows
) -> Callable[..., OneProcessOrder]:
    """Make the function with which `keep_sample_order` makes the sampler of each data loader.

    Args:
        device: device of this rank.
        resumed: function that returns the state that the next sampler of a training loader resumes,
            if any.
        rows: how the rows of a training loader are dealt to ranks.
    """

    def make(sampler: Any, dataset: Any, *, training: bool, **arguments: Any) -> OneProcessOrder:
        dealt = rows if training else None
        order = OneProcessOrder(
            sampler, dataset, **arguments, device=device, seed=global_seed(), rows=dealt
        )
        state = resumed() if training else None
        if state is not None:
            order.resume(state)
        return order

    return make


def orders_in(loaders: Any) -> list[OneProcessOrder]:
    """Find the samplers of this kind in loaders in any nesting. That of a batch sampler of the
    user's own is inside it."""
    found = []
    for loader in tree_leaves(loaders):
        samplers = (
            getattr(loader, "sampler", None),
            getattr(getattr(loader, "batch_sampler", None), "sampler", None),
        )
        found += [sampler for sampler in samplers if isinstance(sampler, OneProcessOrder)][:1]
    return found


def require_equal_orders(loaders: Any, device: torch.device) -> None:
    """Refuse ranks that drew different orders, which would read some samples twice and others not
    at all.

    One all-reduce over all ranks.

    Raises:
        DataError: on all ranks.
    """
    orders = [
        order for order in orders_in(loaders) if not isinstance(order.sampler, SequentialSampler)
    ]
    if not orders or not dist.is_initialized():
        return
    checksums = torch.tensor([order.checksum for order in orders], dtype=torch.int64, device=device)
    extremes = torch.cat([checksums, -checksums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest, lowest = extremes[: len(orders)], -extremes[len(orders) :]
    differing = next(
        (
            order
            for order, differs in zip(orders, (highest != lowest).tolist(), strict=True)
            if differs
        ),
        None,
    )
    if differing is not None:
        raise DataError(
            f"The sampler {type(differing.sampler).__name__} orders the samples differently on"
            " different ranks. Every rank must draw the same order, because the strategy selects"
            " each rank's samples from it. Use the same seed for the sampler on all ranks, and do"
            " not read the loader on only one rank when an epoch begins. If the sampler returns"
            " only the samples of its own rank, set Trainer(use_distributed_sampler=False)."
        )


def reset_unequal_generators(reset: Callable[[], Any], device: torch.device) -> None:
    """Reset the generators whose state differs between ranks; others stay as they are. Two small
    collectives over all ranks.

    Args:
        reset: function that puts all generators into the state after `seed_everything`.
        device: device of tensors for collectives.
    """
    before = json.loads(_read(None))
    unequal = _unequal_states(json.dumps(before), device)
    if unequal:
        reset()
        after = json.loads(_read(None))
        _set(None, json.dumps(before | {name: after[name] for name in unequal}))


def resumed_orders(
    saved: Sequence[dict[str, Any] | None] | None, epoch: int
) -> Iterator[dict[str, Any] | None]:
    """States that the samplers of the training loaders `resume`, one after the other, from the
    entry of a checkpoint.

    Args:
        saved: the entry; None for a checkpoint without it.
        epoch: epoch in which the checkpoint was saved.
    """
    if saved is not None:
        yield from saved
        return
    while True:
        yield {"epoch": epoch, "start": DISTRIBUTED, "own": None}


def _checksum(order: list[Any], before: int = 0) -> int:
    try:
        return zlib.crc32(array("q", order), before)
    except (TypeError, OverflowError):  # a data set may have keys that are not numbers
        return zlib.crc32(repr(order).encode(), before)


def _unequal_states(mine: str, device: torch.device) -> dict[str, Any]:
    """Rank 0's states of the generators whose state differs between ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    row = torch.frombuffer(bytearray(mine.encode().ljust(_STATE_BYTES)), dtype=torch.uint8).to(
        device
    )
    dist.broadcast(row, 0)
    own, common = json.loads(mine), json.loads(bytes(row.tolist()))
    unequal = torch.tensor(
        [own[name] != common[name] for name in sorted(own)], dtype=torch.int32, device=device
    )
    dist.all_reduce(unequal, op=dist.ReduceOp.MAX)
    return {
        name: common[name]
        for name, differs in zip(sorted(own), unequal.tolist(), strict=True)
        if differs
    }


def _read(sampler: Any) -> str:
    """Read the states of all generators that a sampler may draw from, by name."""
    states = json.loads(bytes(read_generators(_HOST).tolist()))
    return json.dumps(states | {"own": _own_state(sampler)})


def _set(sampler: Any, states: str) -> None:
    set_generators(torch.frombuffer(bytearray(states.encode()), dtype=torch.uint8), _HOST)
    own = json.loads(states)["own"]
    if own is not None:
        _set_own_state(sampler, own)


def _own_state(sampler: Any) -> str | None:
    generator = getattr(sampler, "generator", None)
    return (
        base64.b64encode(bytes(generator.get_state().tolist())).decode()
        if isinstance(generator, torch.Generator)
        else None
    )


def _set_own_state(sampler: Any, state: str) -> None:
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8))
