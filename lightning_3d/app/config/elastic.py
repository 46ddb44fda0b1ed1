"""`parallelism.elastic`: a run uses the ranks that are there, in a smaller layout where some are
missing. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_3d.app.config.machine import visible_gpus
from lightning_3d.app.config.run_config import RunConfig
from lightning_3d.errors import ConfigError, plural
from lightning_3d.layout.batch_ramp import BatchRamp
from lightning_3d.layout.batch_rules import check_batch, check_ramp, largest_micro_batch
from lightning_3d.layout.elastic import fitting_layout, whole_layout
from lightning_3d.layout.layout import Layout
from lightning_3d.ranks.environment import OutsideRank


@dataclass(frozen=True)
class Adapted:
    """A run on the ranks that are there.

    Attributes:
        run: the run; `parallelism.elastic` is false, or the name of the layout with all ranks.
        layout: layout to use.
        whole: layout with all ranks.
        warnings: messages for the user before the start.
    """

    run: RunConfig
    layout: Layout
    whole: Layout
    warnings: tuple[str, ...] = ()


def adapt(run: RunConfig, layout: Layout, schedule: str, outside: OutsideRank | None) -> Adapted:
    """Fit a layout to the ranks that were started, if the run is elastic.

    Args:
        layout: resolved, as it is configured.
        outside: this process as a rank of torchrun or SLURM; None when the ranks are still to be
            started.

    Raises:
        LayoutError: the number of ranks is wrong, or too small even for an elastic run.
        ConfigError: a value of `parallelism.elastic` that does not fit the layout.
    """
    elastic = run.parallelism.elastic
    if elastic is False or elastic is None:
        if outside is not None:
            layout.require_world_size(outside.world_size)
        return Adapted(run, layout, layout)
    whole = _whole(elastic, layout)
    ranks = outside.world_size if outside is not None else _ranks_here(run, whole)
    if ranks > whole.world_size:
        whole.require_world_size(ranks)
    batch, size = run.data.get("global_batch_size"), run.parallelism.micro_batch_size
    if batch is None:
        raise ConfigError(
            "data.global_batch_size must be given for an elastic run, which keeps it on any number"
            " of ranks."
        )
    length = run.data.get("sequence_length") or 1  # without one, the run is refused later
    ramp = BatchRamp.read(run.data.get("batch_ramp"), batch, length)
    size = size or largest_micro_batch(whole, schedule, batch, ramp.sizes)
    check_batch(whole, batch, size, schedule)
    check_ramp(whole, ramp, size, schedule)
    shards = run.parallelism.zero_shard_size
    found = fitting_layout(
        whole,
        ranks=ranks,
        global_batch_size=batch,
        micro_batch_size=size,
        schedule=schedule,
        zero_shard_size=shards,
        smaller_batches=ramp.sizes[:-1],
    )
    run = replace(
        run, parallelism=replace(run.parallelism, elastic=whole.name, micro_batch_size=size)
    )
    if found.world_size == whole.world_size:
        return Adapted(run, found, whole)
    if shards == whole.dp:  # all data-parallel ranks shard
        run = replace(run, parallelism=replace(run.parallelism, zero_shard_size=None))
    spare = ranks - found.world_size
    idle = f" {plural(spare, 'rank')} {'has' if spare == 1 else 'have'} no work." if spare else ""
    warning = (
        f"{ranks} of {whole.world_size} ranks are here, so this elastic run uses {found} instead of"
        f" {whole}. The global batch is still {batch}.{idle}"
    )
    return Adapted(run, found, whole, (warning,))


def _whole(elastic: object, layout: Layout) -> Layout:
    """Return the layout with all ranks. In the configuration of an earlier attempt, `elastic` has
    its name."""
    if elastic is True:
        return layout
    try:
        return whole_layout(elastic, layout)
    except ConfigError:
        raise ConfigError(f"parallelism.elastic must be true or false; got {elastic!r}.") from None


def _ranks_here(run: RunConfig, whole: Layout) -> int:
    """Return how many ranks of a run can be started on this machine: one for each GPU, or any
    number on CPU cores.

    A run that is only described, or that other machines will start, has all of its ranks.
    """
    if run.trainer.dry or run.cluster.nodes > 1:
        return whole.world_size
    gpus = 0 if run.cluster.accelerator == "cpu" else visible_gpus()
    return min(gpus, whole.world_size) or whole.world_size
