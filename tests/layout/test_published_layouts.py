"""Every model on every layout that somebody published a measurement of: it passes exactly where it
can work."""

import re
from dataclasses import replace
from typing import Any

import pytest
from composed_configs import ON_GPUS, composed, options, recipe

from lightning_3d.app.config.plan_run import check_keys, plan_run
from lightning_3d.app.config.run_config import RunConfig
from lightning_3d.errors import LayoutError
from lightning_3d.layout import Layout
from lightning_3d.models.families import read_spec
from lightning_3d.models.spec import ModelSpec

PUBLISHED = {
    "Narayanan et al., SC21 (arXiv:2104.04473), tables 1 and 2": (
        "tp2_dp32 tp4_dp32 tp8_dp32 tp8_pp2_dp32 tp8_pp4_dp32_vp3 tp8_pp8_dp24_vp2 tp8_pp12_dp16"
        " tp8_pp16_dp15_vp2 tp8_pp35_dp8 tp8_pp35_dp9_vp3 tp8_pp64_dp6"
    ),
    "NVIDIA/Megatron-LM, README, table of Megatron Core 0.8": (
        "dp48 tp2_dp48 tp4_dp48 tp8_pp2_dp48 tp8_pp4_dp48 tp8_pp6_dp48 tp8_pp8_dp48 tp8_pp16_dp48"
    ),
    "NVIDIA/NeMo, docs/source/performance/performance_summary.md": (
        "dp8 pp2_dp4 pp4_dp4_vp10 tp2_dp8 tp2_pp4_dp8_vp10 tp4_pp4_dp4_vp20"
        " tp4_pp8_dp4_vp6 tp8_pp8_dp2_vp12"
    ),
    "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md": (
        "tp2_pp4_vp20 tp4_pp4_dp2_vp5 tp4_pp8_dp2_vp5"
    ),
    "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md": "dp128 tp8_dp8 tp8_pp8_dp8",
    "The Ultra-Scale Playbook (Hugging Face), benchmarks of nanotron": (
        "pp8 pp16_dp8 tp4_pp16_dp4 tp16_dp16 tp16_pp2_dp8 tp16_pp16_dp2"
        " tp32_dp16 tp32_pp4_dp4 tp2_pp32_dp8 tp8_pp32"
    ),
}


@pytest.fixture(scope="module")
def layouts() -> tuple[Layout, ...]:
    """All of them, and those of our recipes without experts. Composing these takes seconds, and
    they are checked with their keys."""
    of_recipes = {
        layout.name for layout in (recipe(name)[1].layout for name in ON_GPUS) if layout.ep == 1
    }
    return tuple(
        map(
            Layout.parse,
            sorted({name for names in PUBLISHED.values() for name in names.split()} | of_recipes),
        )
    )


@pytest.fixture
def keys_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and types of a model's configuration are the same for all layouts: they are checked
    once, which takes most of the time."""
    monkeypatch.setattr("lightning_3d.app.config.plan_run.check_keys", lambda run: run)


def suit(run: RunConfig, layout: Layout) -> RunConfig:
    """As many GPUs as the layout has ranks, and four micro-batches for each stage of the
    pipeline."""
    assert run.parallelism.micro_batch_size is not None
    return replace(
        run,
        parallelism=replace(run.parallelism, layout=layout.name),
        cluster=replace(run.cluster, nodes=layout.world_size, gpus_per_node=1),
        data={
            **run.data,
            "global_batch_size": run.parallelism.micro_batch_size * layout.dp * layout.pp * 4,
        },
    )


def divides(tp: int, spec: ModelSpec) -> bool:
    """Whether each of tp ranks gets whole heads and equal parts of the MLP; a key/value head may be
    on several ranks."""
    return (
        spec.heads % tp == 0
        and spec.intermediate % tp == 0
        and (spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0)
    )


def check_refusal(message: str, spec: ModelSpec, layout: Layout) -> None:
    """It names exactly the degrees that work."""
    repair = message.partition(" Use ")[2].rstrip(".")
    if not divides(layout.tp, spec):
        assert {int(size) for size in re.findall(r"\d+", repair)} == {
            tp for tp in range(1, spec.heads + 1) if divides(tp, spec)
        }
        return
    assert f"only {spec.layers} layers" in message
    for phrase in repair.split(", or "):
        sizes = {
            axis: int(size) for axis, size in re.findall(r"\b(pp|vp)(?: of at most)? (\d+)", phrase)
        }
        better = replace(layout, **sizes)
        assert sizes and better.pp * better.vp <= spec.layers, phrase
        for axis in re.findall(r"\b(pp|vp) of at most", phrase):
            more = replace(better, **{axis: sizes[axis] + 1})
            assert more.pp * more.vp > spec.layers, phrase


@pytest.mark.parametrize("model", [name for name in options("model") if name != "pretrained"])
def test_every_model_on_every_published_layout(
    model: str, layouts: tuple[Layout, ...], keys_are_checked: None
) -> None:
    run = check_keys(composed(f"model={model}", "cluster=h100_1x8", "trainer.dry=true"))
    spec = read_spec(run.model["config"])
    refused = set()
    for layout in layouts:
        config: Any = suit(run, layout)
        if divides(layout.tp, spec) and spec.layers >= layout.pp * layout.vp:
            assert plan_run(config).layout == layout
            continue
        refused.add(layout.name)
        with pytest.raises(LayoutError) as error:
            plan_run(config)
        check_refusal(str(error.value), spec, layout)
    most = max(layout.pp * layout.vp for layout in layouts)
    assert refused or spec.layers >= most, "some of the layouts are for larger models"
    if not model.endswith("tiny"):
        assert ("tp8_dp8" in refused) == (spec.heads % 8 != 0), "28 heads"
