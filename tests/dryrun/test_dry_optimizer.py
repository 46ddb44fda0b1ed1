"""A dry run steps with the kernels that a GPU would: memory of the optimizer's step, fused, foreach
and offloaded."""

from typing import Any

import pytest
import torch
from alphabet_fits import MODEL, OPTIMIZER
from ranks import run_ranks

ROWS, TOKENS = 2, 4
"""So few that the optimizer's step needs more memory than the backward; on one rank, which needs no
buffers to reduce gradients in."""

PLAIN = {**OPTIMIZER, "scheduler": None, "no_decay": []}
"""With one parameter group, whose elements are updated together."""


def by_class(name: str, **options: Any) -> dict[str, Any]:
    return {"_target_": f"torch.optim.{name}", "lr": 0.1, "weight_decay": 0.0, **options}


def dry_steps(
    cases: list[tuple[dict[str, Any], dict[str, Any], bool]],
) -> list[tuple[Any, Any, int, int]]:
    """For each (group `optimizer`, options of the strategy, for GPUs): (`fused`, `foreach`, most
    bytes, parameters)."""
    from lightning_3d.app.dryrun.run import DryJob, DryStrategy, dry_run
    from lightning_3d.app.training.module import CausalLM
    from lightning_3d.layout import Layout

    found = []
    for optimizer, options, gpu in cases:
        made: list[DryStrategy] = []
        layout = "dp2" if options else "dp1"

        def strategy(
            kind: type[DryStrategy],
            options: dict[str, Any] = options,
            made: list[DryStrategy] = made,
            layout: str = layout,
        ) -> DryStrategy:
            made.append(kind(layout, micro_batch_size=ROWS, **options))
            return made[0]

        job = DryJob(
            module=lambda optimizer=optimizer: CausalLM(MODEL, optimizer),  # type: ignore[misc]
            strategy=strategy,
            batch=lambda count: dict.fromkeys(
                ("input_ids", "labels"), torch.zeros(ROWS * count, TOKENS, dtype=torch.long)
            ),
            layout=Layout.parse(layout),
            schedule="1F1B",
            micro_batches=1,
            gpu=gpu,
        )
        report = dry_run(job, 0)
        [group, *_] = made[0].optimizers[0].param_groups
        found.append(
            (group.get("fused"), group.get("foreach"), report.usage.peak_bytes, report.parameters)
        )
    return found


def of(*cases: tuple[dict[str, Any], dict[str, Any], bool]) -> list[tuple[Any, Any, int, int]]:
    [found] = run_ranks(dry_steps, 1, list(cases), process_group=False, timeout=300)
    return found


@pytest.mark.slow
def test_a_fused_step_needs_no_memory_of_its_own() -> None:
    """Without it, AdamW of torch holds the roots of all second moments at once: 4 bytes for each
    parameter."""
    told = [{**PLAIN, "fused": fused} for fused in (None, False, True)]
    fused, foreach, asked, cpu = of(
        *((optimizer, {}, True) for optimizer in told), (PLAIN, {}, False)
    )
    assert (
        fused == asked
        and fused[:2] == (True, None)
        and foreach[:2] == (None, True)
        and cpu[:2] == (None, None)
    )
    assert foreach[2] - fused[2] == pytest.approx(4 * fused[3], rel=0.05)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "NAdam"])
def test_other_classes(name: str) -> None:
    """Those that have fused kernels; torch has no shape functions of some."""
    [found] = of((by_class(name), {}, True))
    assert found[:2] == ((None, True) if name == "NAdam" else (True, None))


def test_an_offloaded_step_is_the_cpu_s() -> None:
    [found] = of((PLAIN, {"zero_stage": 1, "zero_offload": "optimizer"}, True))
    assert found[:2] == (None, None)
