"""Memory of the modules of multi-token prediction that the planner counts, against a dry run of a
rank of the last stage."""

from __future__ import annotations

import pytest
from composed_configs import dry
from ranks import run_ranks

from lightning_3d.app.planner.advice import job_of
from lightning_3d.app.planner.block_memory import block_bytes
from lightning_3d.app.planner.memory import stages_in_flight
from lightning_3d.app.planner.rank_memory import memory_of_rank

WORDS = (
    *(
        "model=deepseek_v3",
        "cluster=h100_1x8",
        "data=tokens",
        "data.sequence_length=4096",
        "data.global_batch_size=16",
        "precision=bf16",
    ),
    *(
        "parallelism.micro_batch_size=2",
        "model.config.num_hidden_layers=2",
        "model.config.first_k_dense_replace=1",
        "force=true",
    ),
    *("model.config.n_routed_experts=16", "model.config.n_group=4", "model.config.topk_group=2"),
)


def dry_bytes(*words: str) -> int:
    from lightning_3d.app.cli.dryrun import job_of as job_of_dry_run
    from lightning_3d.app.dryrun.run import dry_run
    from lightning_3d.app.runs.check import check_shapes

    config, plan = check_shapes(words)
    first = (plan.layout.pp - 1) * plan.layout.tp * plan.layout.cp  # rank of the last stage
    return sum(dry_run(job_of_dry_run(config, plan), first).usage.peak.values())


def counted_bytes(*words: str) -> float:
    _, plan = dry(*words)
    job = job_of(plan.run, "bf16", plan.layout, plan.schedule, plan.micro_batch_size)
    memory = memory_of_rank(job, stages_in_flight(job)[-1], block_bytes(job))
    return memory.total - memory.other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("pp2_dp4_ep2", ()),
        pytest.param("pp2_dp4_ep2", ("loss_chunks=auto",), marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("modules", [1, pytest.param(2, marks=pytest.mark.full)])
def test_modules_take_what_a_dry_run_says(
    layout: str, options: tuple[str, ...], modules: int
) -> None:
    """The activations of their blocks, of three norms more, and the logits of each, of which the
    last alone has gradients at the peak.

    Within 4 %, as the stages without them.
    """
    words = (*WORDS, f"parallelism={layout}", *(f"parallelism.{option}" for option in options))
    ways = [(*words, f"model.mtp_layers={layers}") for layers in ("null", modules)]
    without, found = (run_ranks(dry_bytes, 1, *way, process_group=False)[0] for way in ways)
    less, counted = map(counted_bytes, *zip(*ways, strict=True))
    assert counted - less == pytest.approx(found - without, rel=0.04)
