"""parallelism.stages=auto: the fastest split of the blocks whose fullest rank fits in memory."""

from dataclasses import replace
from itertools import product

import pytest
from composed_configs import dry
from omegaconf import OmegaConf

from lightning_3d import planned
from lightning_3d.app.planner.advice import job_of, machine_of
from lightning_3d.app.planner.choices import Fixed
from lightning_3d.app.planner.fitting_stages import fitting_job, fitting_stages
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.memory import memory_of
from lightning_3d.app.planner.search import search
from lightning_3d.app.planner.stages import block_work, end_work, stages_of
from lightning_3d.app.planner.step_time import step_of
from lightning_3d.app.planner.tables import describe
from lightning_3d.errors import LayoutError
from lightning_3d.layout import Layout
from lightning_3d.layout.given_stages import given_stages

GIB = 2**30
DATA = ("data=tokens", "data.sequence_length=8192", "data.global_batch_size=64")
LLAMA = (
    "model=llama3_70b",
    "cluster=h100_4x8",
    "parallelism=tp4_pp8",
    "parallelism.micro_batch_size=1",
    *DATA,
)
QWEN = ("model=qwen2_5_7b", "cluster=h100_1x8", *DATA)


def job(*words: str) -> Job:
    _, checked = dry(*words, "force=true")
    return job_of(checked.run, "bf16", checked.layout, checked.schedule, checked.micro_batch_size)


def small(layers: int, pp: int) -> Job:
    whole = job(*QWEN, "parallelism=pp8", "parallelism.micro_batch_size=1")
    return replace(whole, model=replace(whole.model, layers=layers), layout=Layout(pp=pp))


@pytest.mark.parametrize(("layers", "pp"), [(8, 2), (10, 3), (11, 4)])
def test_no_split_that_fits_has_a_faster_slowest_stage(layers: int, pp: int) -> None:
    """Against all splits."""
    one = small(layers, pp)
    [(block, _)], (_, (head, _)) = block_work(one.model), end_work(one.model)
    splits = [split for split in product(range(1, layers), repeat=pp) if sum(split) == layers]
    needs = {split: memory_of(replace(one, blocks=split)).total for split in splits}
    slowest = {split: max([*split[:-1], split[-1] + head / block]) for split in splits}
    least, most = min(needs.values()), memory_of(one).total
    assert fitting_stages(one, least - 1) is None
    for share in (0.0, 0.1, 0.3, 0.6, 0.99):
        room = least + share * (most - least)
        found = fitting_job(one, room)
        assert found is not None and found.blocks is not None and needs[found.blocks] <= room
        assert slowest[found.blocks] == min(
            slowest[split] for split in splits if needs[split] <= room
        )
    assert fitting_job(one, most) is one


@pytest.mark.slow
def test_a_layout_that_does_not_fit_with_stages_of_equal_work_fits_with_others() -> None:
    """1F1B keeps 8 micro-batches of the first stage's blocks, and one of the last's."""
    with pytest.raises(LayoutError, match="tp4_pp8 needs about 95.2 GiB on its fullest rank"):
        dry(*LLAMA)
    config, checked = dry(*LLAMA, "parallelism.stages=auto")
    assert checked.run.parallelism.stages == [6, 7, 8, 9, 10, 12, 14, 14]
    assert checked.freeze(OmegaConf.to_container(config))["parallelism"]["stages"] == [
        6,
        7,
        8,
        9,
        10,
        12,
        14,
        14,
    ], "ranks need no planner"
    fitting, balanced = job(*LLAMA, "parallelism.stages=auto"), job(*LLAMA)
    assert memory_of(fitting).total < 74.5 * GIB < 94 * GIB < memory_of(balanced).total
    assert [stage.blocks for stage in stages_of(balanced)] == [9, 10, 10, 10, 10, 11, 11, 9]
    machine = machine_of(checked.run.cluster)
    assert machine is not None
    recomputed = replace(balanced, recompute="full")
    assert (
        memory_of(recomputed).total < 74.5 * GIB
        and step_of(fitting, machine).seconds < step_of(recomputed, machine).seconds
    )


def test_virtual_stages_of_a_rank_share_its_memory() -> None:
    one = job(*LLAMA, "parallelism=tp4_pp4_dp2_vp2", "parallelism.schedule=Interleaved1F1B")
    room = 0.9 * memory_of(one).total
    fitting = fitting_job(one, room)
    assert (
        fitting is not None
        and fitting.blocks is not None
        and len(fitting.blocks) == 8
        and sum(fitting.blocks) == 80
    )
    assert memory_of(fitting).total <= room


def test_stages_that_fit_stay_balanced_and_unknown_memory_changes_nothing() -> None:
    for words in (
        (*QWEN, "parallelism=pp8", "parallelism.micro_batch_size=1", "parallelism.recompute=full"),
        ("parallelism=pp2_dp4", "cluster=local_cpu"),
    ):
        config, checked = dry(*words, "parallelism.stages=auto")
        assert (
            checked.run.parallelism.stages is None
            and checked.freeze(OmegaConf.to_container(config))["parallelism"]["stages"] is None
        )


def test_auto_chooses_stages_only_if_it_may() -> None:
    whole = job(*QWEN, "parallelism=pp8", "parallelism.micro_batch_size=1")
    fixed = Fixed(layout=Layout(pp=8), schedule="1F1B", micro_batch=1, recompute="none")
    machine, room = (
        machine_of(dry(*QWEN, "parallelism=dp8", "force=true")[1].run.cluster),
        0.8 * memory_of(whole).total,
    )
    assert machine is not None
    assert not search(whole, machine, fixed=fixed, room=room).best
    [found] = search(whole, machine, fixed=replace(fixed, fit_stages=True), room=room).best
    assert found.job.blocks is not None and found.memory.total <= room
    assert describe(found.job).endswith(
        f"parallelism.stages=[{','.join(map(str, found.job.blocks))}]"
    )


def test_advice_names_it_where_it_is_enough() -> None:
    words = (*QWEN, "parallelism=pp8", "parallelism.micro_batch_size=1")
    _, checked = dry(*words)
    assert any("Use parallelism.stages=auto (" in warning for warning in checked.warnings), (
        checked.warnings
    )
    _, checked = dry(*words, "parallelism.stages=auto")
    assert not checked.warnings and checked.run.parallelism.stages == [2, 3, 4, 4, 4, 4, 5, 2]


def test_a_script_gets_the_list_from_planned() -> None:
    config = dict(
        dry(*QWEN, "parallelism=pp8", "parallelism.micro_batch_size=1", "force=true")[1].model[
            "config"
        ]
    )
    options = {
        "cluster": "h100_1x8",
        "sequence_length": 8192,
        "global_batch_size": 64,
        "micro_batch_size": 1,
    }
    found = planned(config, layout="pp8", stages="auto", **options)
    assert found["stages"] == [2, 3, 4, 4, 4, 4, 5, 2]
    with pytest.raises(LayoutError, match=r"stages='auto' asks the planner.*lightning_3d.planned"):
        given_stages("auto", Layout(pp=8))
    with pytest.raises(LayoutError, match=r"stages='even' must be auto or a list"):
        given_stages("even", Layout(pp=8))
