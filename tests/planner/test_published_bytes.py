"""benchmarks/planner_bytes.md: the planner's proposals for published jobs, and Megatron-LM's bytes
by its own formulas."""

import pytest

from benchmarks import planner_bytes
from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.plan_run import check_keys
from lightning_3d.app.config.run_config import CompleteRun, complete_run
from lightning_3d.app.planner.advice import (
    PlannerAdvice,
    faster_chunked,
    faster_compiled,
    faster_overlapped,
    plan,
)
from lightning_3d.app.planner.memory import memory_of
from lightning_3d.app.planner.memory_risk import largest_share
from lightning_3d.app.planner.tables import chunked_line, compiled_line, describe
from lightning_3d.errors import LayoutError
from lightning_3d.layout.layout import Layout


@pytest.mark.slow
def test_tables_are_not_stale() -> None:
    """`python -m benchmarks.planner_bytes` would change nothing."""
    page = planner_bytes.PAGE.read_text("utf-8")
    assert planner_bytes.filled(page) == page


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("one", planner_bytes.JOBS, ids=lambda one: one.name.replace(" ", "_"))
def test_proposals_are_those_of_the_planner(one: tuple[str, str, str, str]) -> None:
    _, words, _, proposed = one
    run = complete_run(check_keys(compose([*words.split(), "data=tokens", "trainer.dry=true"])))
    best = plan(run, "bf16").best[0].job
    assert set(proposed.split()) <= set(describe(best).split())
    assert not (best.layout.name == "dp1024" and best.zero == 3), (
        "sharding over 1024 ranks gathers each block over all nodes"
    )


def test_bytes_of_megatron_are_those_of_its_formulas() -> None:
    """Llama 3 70B, tp4, pp4, cp2, dp2, vp5, by hand: theoretical_memory_usage.py counts the first
    stage and one embedding."""
    one = planner_bytes.JOBS[0]
    layout = Layout.parse(one.layout)
    memory = planner_bytes.megatron(
        planner_bytes.job(f"{one.words} parallelism={one.layout}").model, layout, 8192
    )
    hidden, ffn, layers, vocabulary = 8192, 28672, 80, 128_256
    block = 2 * hidden * (ffn * 3 / 2 + 1) + 2 * hidden * hidden * (1 + 8 / 64)
    own = (block * layers / 4 + hidden * vocabulary) / 4
    assert memory.weights + memory.gradients + memory.optimizer == pytest.approx(
        (6 + 12 / 4) * own, rel=1e-4
    )
    # Its formula for activations counts dropout, but neither a gated MLP nor grouped queries; it
    # knows no cp
    table_2 = 8192 / 2 * hidden * (18 + 4 * ffn / hidden) * layers * (1 + 3 / 20) / 4
    assert memory.activations == pytest.approx(table_2, rel=0.06)


@pytest.mark.slow
def test_compiled_blocks_are_suggested_where_they_help() -> None:
    """As what makes the published layout of 70B on 64 GPUs fit, and as what a plan without them
    would gain."""
    words = planner_bytes.JOBS[0].words.split()
    run = complete_run(
        check_keys(compose([*words, "data=tokens", "trainer.dry=true", "parallelism.zero_stage=1"]))
    )
    warnings = PlannerAdvice().refuse(
        run, "bf16", Layout.parse(planner_bytes.JOBS[0].layout), "Interleaved1F1B", 1
    )
    assert "Use parallelism.loss_chunks=auto parallelism.compile=true (" in warnings[0]
    first = plan(run, "bf16", most=1).best[0]
    faster = faster_compiled(run, "bf16", first)
    assert faster is not None and faster.step.seconds < 0.98 * first.step.seconds
    assert compiled_line(faster, first).startswith(
        f"With parallelism.compile=true parallelism.loss_chunks=auto, {faster.job.layout.name} "
    )
    compiles = complete_run(
        check_keys(compose([*words, "data=tokens", "trainer.dry=true", "parallelism.compile=true"]))
    )
    assert faster_compiled(compiles, "bf16", faster) is None


@pytest.mark.slow
def test_a_loss_in_chunks_alone_is_suggested_where_it_helps() -> None:
    """Llama 3.1 8B on 4 GPUs: with 32k tokens, tp4 fits only with it, and is faster than cp4; with
    128k, nothing fits without it. It does not help with 2k tokens."""

    def run_with(*words: str) -> CompleteRun:
        return complete_run(
            check_keys(
                compose(
                    [
                        "model=llama3_1_8b",
                        "parallelism=auto",
                        "data=tokens",
                        "trainer.dry=true",
                        *words,
                    ]
                )
            )
        )

    words = ["cluster=h100_1x4", "data.global_batch_size=8"]
    run = run_with(*words, "data.sequence_length=32768")
    first = plan(run, "bf16", most=1).best[0]
    faster = faster_chunked(run, "bf16", first)
    assert faster is not None and faster.step.seconds < 0.98 * first.step.seconds
    assert (
        memory_of(faster.job.but(loss_chunks=1)).total
        > largest_share(0.1) * 80e9
        > faster.memory.total
    )
    assert chunked_line(faster, first).startswith(
        "With parallelism.loss_chunks=auto, tp4 fits and is predicted to be "
    )
    chunked = run_with(*words, "data.sequence_length=32768", "parallelism.loss_chunks=auto")
    assert (
        plan(chunked, "bf16", most=1).best[0] == faster
        and faster_chunked(chunked, "bf16", faster) is None
    )
    with pytest.raises(
        LayoutError, match=r"With parallelism\.loss_chunks=auto, cp4 fits \([0-9.]+ GiB\)\. "
    ):
        plan(run_with(*words, "data.sequence_length=131072"), "bf16")
    short = run_with(*words, "data.sequence_length=2048")
    assert faster_chunked(short, "bf16", plan(short, "bf16", most=1).best[0]) is None


@pytest.mark.slow
def test_gathering_during_the_next_forward_is_proposed_where_it_saves_time() -> None:
    """Of Llama 3.1 8B over 64 GPUs, gathering takes 8 % of a step with ZeRO 1. ZeRO 3 gathers
    blocks one by one in any case."""
    words = [
        "model=llama3_1_8b",
        "cluster=h100_8x8",
        "data.global_batch_size=64",
        "data.sequence_length=4096",
        "parallelism=auto",
    ]
    words += ["data=tokens", "trainer.dry=true"]
    found = []
    for more in (
        "parallelism.zero_stage=1",
        "parallelism.zero_stage=3",
        "parallelism.zero_overlap_gather=true",
    ):
        run = complete_run(check_keys(compose([*words, more])))
        best = plan(run, "bf16", most=2)
        found.append((best, faster_overlapped(run, best)))
    (plain, faster), (_, of_blocks), (overlapped, nothing) = found
    assert (
        faster is not None
        and faster.job.overlap_gather
        and faster.step.seconds < 0.99 * plain.best[0].step.seconds
    )
    assert of_blocks is None and nothing is None
    assert all(one.job.overlap_gather and one.job.zero in (1, 2) for one in overlapped.best)
    assert overlapped.best[0].step.seconds <= faster.step.seconds
