"""Models whose blocks are not alike: what each pipeline stage has is that of its own blocks, not an
average."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from versions import since_transformers

from lightning_3d.app.dryrun.gpu_attention import gpu_attention
from lightning_3d.app.planner.architecture import Architecture, BlockKind
from lightning_3d.app.planner.block_costs import work_of
from lightning_3d.app.planner.block_memory import block_activations, block_bytes
from lightning_3d.app.planner.constants import OURS
from lightning_3d.app.planner.fitting_stages import fitting_job
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Efficiency, Machine
from lightning_3d.app.planner.memory import least_memory, memory_of, stages_in_flight
from lightning_3d.app.planner.rank_memory import memory_of_rank
from lightning_3d.app.planner.stages import parameters_of, stages_of
from lightning_3d.compat.torch_fake import fake_mode
from lightning_3d.layout import Layout
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.pipeline.stages import assign_stages

CONF = Path(__file__).parents[2] / "conf/model"
NAMES = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "pretrained")
MACHINE = Machine(
    "H100", 4, 8, 80e9, 3.35e12, 989e12, 1979e12, 67e12, 450e9, 50e9, 0.0, 0.0, Efficiency(0.6, 0.4)
)
TINY_DEEPSEEK = {"num_hidden_layers": 8, "first_k_dense_replace": 3}


def fields(name: str, **changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load((CONF / f"{name}.yaml").read_text())["config"], **changes}


@cache
def built(name: str, **changes: Any) -> nn.Module:
    """The model on meta."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields(name, **changes)))


def job(name: str, layout: str, **changes: Any) -> Job:
    return Job(
        Architecture.from_config(fields(name, **changes)),
        Layout.parse(layout),
        1024,
        64,
        1,
        stack=OURS,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "tiny" in name else pytest.mark.full) for name in NAMES]
)
def test_parameters_are_those_of_transformers(name: str) -> None:
    assert Architecture.from_config(fields(name)).parameters == sum(
        parameter.numel() for parameter in built(name).parameters()
    )


CASES = [
    ("deepseek_v3_tiny", "pp2", {}),
    ("deepseek_v3_tiny", "pp4", TINY_DEEPSEEK),
    ("qwen3_moe_tiny", "pp2", {}),
    ("qwen2_moe_tiny", "pp2", {"num_hidden_layers": 7}),
    ("gpt_oss_tiny", "pp3", {"num_hidden_layers": 7}),
    ("llama_tiny", "pp3", {"vocab_size": 6000}),
    pytest.param("deepseek_v3", "pp16", {}, marks=pytest.mark.full),
    pytest.param("llama3_70b", "pp8", {}, marks=pytest.mark.full),
    pytest.param("gpt_oss_120b", "pp4", {}, marks=pytest.mark.full),
    pytest.param("qwen3_235b_a22b", "pp8", {}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "layout", "changes"), CASES)
def test_stages_and_their_parameters_are_those_of_the_engine(
    name: str, layout: str, changes: dict[str, Any]
) -> None:
    """Against the engine's assignment of the blocks of the whole model, and the sizes of its
    parameters by name."""
    module, one = built(name, **changes), job(name, layout, **changes)
    plan = read_plan(module)
    ranges = assign_stages(module, plan, one.layout, "1F1B").layers
    assert [stage.blocks for stage in stages_of(one)] == [len(blocks) for blocks in ranges]
    blocks = list(module.get_submodule(plan.layers).children())
    ends = [
        sum(_size(module.get_submodule(name)) for name in names)
        for names in (plan.before, plan.after)
    ]
    for index, (stage, owned) in enumerate(zip(stages_of(one), ranges, strict=True)):
        size = (
            sum(_size(blocks[block]) for block in owned)
            + ends[0] * (index == 0)
            + ends[1] * (index == len(ranges) - 1)
        )
        assert sum(parameters_of(one, stage)) == size


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


SEQ = 256


# before, its latent attention keeps 4 % more
LATER = pytest.param("deepseek_v3", marks=since_transformers("5.24"))


@pytest.mark.parametrize(
    "name", ["llama3_1_8b", "qwen3_8b", "mixtral_8x7b", "qwen3_30b_a3b", LATER, "gpt_oss_120b"]
)
def test_each_kind_of_block_keeps_what_autograd_saves(name: str) -> None:
    """Counted on Transformers' own blocks of the real widths, without values, with the kernel of
    attention that GPUs have."""
    first = {"first_k_dense_replace": 1} if name == "deepseek_v3" else {}
    config = fields(name, num_hidden_layers=2, **first)
    kernel = yaml.safe_load((CONF / f"{name}.yaml").read_text())["attn_implementation"]
    model = Architecture.from_config(config)
    one = Job(model, Layout(), SEQ, 1, 1, stack=replace(OURS, flash=kernel != "eager"))
    for index, saved in enumerate(_saved_by_blocks(config, kernel)):
        kind = model.kinds[model.pattern[index]]
        assert block_activations(one, kind) == pytest.approx(saved, rel=0.01), kind


def _saved_by_blocks(config: dict[str, Any], kernel: str) -> list[int]:
    """Bytes of storages that each block saves for its backward pass, without parameters and without
    what blocks before it saved."""
    with fake_mode(), gpu_attention(True):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.bfloat16, attn_implementation=kernel
        )
        hidden = torch.zeros(
            1, SEQ, config["hidden_size"], dtype=torch.bfloat16, requires_grad=True
        )
        angles = model.model.rotary_emb(hidden, torch.arange(SEQ).unsqueeze(0))
        mask = torch.zeros(1, 1, SEQ, SEQ, dtype=torch.bfloat16) if kernel == "eager" else None
        seen = {
            tensor.untyped_storage()._cdata: tensor
            for tensor in [*model.parameters(), *angles, *([mask] if mask is not None else [])]
        }
        found = []
        for block in model.model.layers:
            before = set(seen)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: _note(seen, tensor), lambda tensor: tensor
            ):
                hidden = block(
                    hidden, attention_mask=mask, position_embeddings=angles, position_ids=None
                )
            found.append(
                sum(
                    tensor.untyped_storage().nbytes()
                    for key, tensor in seen.items()
                    if key not in before
                )
            )
        return found


def _note(seen: dict[int, Tensor], tensor: Tensor) -> Tensor:
    seen.setdefault(tensor.untyped_storage()._cdata, tensor)
    return tensor


def test_a_stage_of_dense_blocks_needs_what_its_own_blocks_do() -> None:
    """DeepSeek-V3 of 8 blocks: experts make up most of the parameters, but the first of 4 stages
    has none."""
    one = job("deepseek_v3", "pp4_dp8_ep8", **TINY_DEEPSEEK)
    stages = stages_of(one)
    assert one.model.kinds == (BlockKind(False), BlockKind(True)) and [
        stage.counts for stage in stages
    ] == [(3, 0), (0, 2), (0, 2), (0, 1)]
    experts = 256 * 3 * 2048 * 7168
    assert [parameters_of(one, stage)[1] for stage in stages] == [
        0,
        2 * experts / 8,
        2 * experts / 8,
        experts / 8,
    ]
    ranks = [memory_of_rank(one, own, block_bytes(one)) for own in stages_in_flight(one)]
    assert ranks[0].optimizer == pytest.approx(12 * parameters_of(one, stages[0])[0] / 8)
    assert (
        memory_of(one).total == max(rank.total for rank in ranks)
        and ranks[0].optimizer < ranks[1].optimizer / 3
    )


def test_windows_save_the_attention_of_their_own_blocks() -> None:
    one = Job(Architecture.from_config(fields("gpt_oss_tiny")), Layout(), 1024, 64, 1)
    window, whole = (
        work_of(one, MACHINE).blocks[one.model.kinds.index(BlockKind(True, reach))]
        for reach in (64, None)
    )
    # of a head, that the window leaves out
    pairs = 1024 * 1025 / 2 - (sum(min(token + 1, 64) for token in range(1024)))
    saved = 4 * pairs * one.model.query_width / OURS.attention_rate(MACHINE)
    assert whole.forward - window.forward == pytest.approx(saved, rel=0.01)


def test_bounds_hold_where_blocks_differ() -> None:
    for layout in ("pp2_dp8_ep8", "pp4_dp8_ep8"):
        one = job("deepseek_v3", layout, **TINY_DEEPSEEK)
        assert next(least_memory(one, [one.recompute]))[1] <= memory_of(one).total


def test_stages_that_fit_are_found_where_blocks_differ() -> None:
    one = job("deepseek_v3", "pp4_dp8_ep8", **TINY_DEEPSEEK)
    fullest = memory_of(one).total
    fitting = fitting_job(one, 0.97 * fullest)
    assert fitting is None or memory_of(fitting).total <= 0.97 * fullest
    assert fitting_job(one, fullest) is one and fitting_job(one, 0.1 * fullest) is None
