"""Recipes and clusters: each passes the checks, fits the memory of its GPUs, and is what its name
says."""

import re
from copy import deepcopy
from math import ceil, prod
from pathlib import Path

import pytest
import torch
from command_line import run_commands
from composed_configs import ON_GPUS, RECIPES, composed, dry, options, recipe
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM

from lightning_3d.app.config.files import conf_folder, recipes_folder
from lightning_3d.app.config.plan_run import RunPlan, check_keys, plan_run
from lightning_3d.app.training.module import transformers_config
from lightning_3d.app.training.parameter_groups import undecayed_names
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.layout.schedules import find_schedule, predicted_bubble
from lightning_3d.models.families import read_spec
from lightning_3d.models.spec import ModelSpec

MODELS = [name for name in options("model") if name != "pretrained"]
PUBLISHED = [name for name in MODELS if not name.endswith("tiny")]
KINDS = ["a100_80gb", "gb200", "h100_sxm", "h200"]
LAYOUTS = [
    "dp8",
    "tp2_dp8",
    "tp2_dp16",
    "tp2_dp32",
    "tp4_dp16",
    "tp8_dp9",
    "tp4_pp4_dp8",
    "tp8_pp2_dp16",
]
LAYOUTS += [
    "tp8_pp4_dp2",
    "tp8_pp4_dp4",
    "tp8_pp4_dp8",
    "tp8_pp4_dp16",
    "tp8_pp8_dp16_vp2",
    "tp4_dp2_cp8",
]
LAYOUTS += ["tp8_pp16_dp8", "tp8_pp12_dp4", "tp8_pp64_dp6", "tp4_cp4", "tp8_cp8"]
EXPERT_LAYOUTS = [
    "dp8_ep8",
    "dp64_ep8",
    "pp2_dp32_ep8",
    "pp4_dp32_ep8_vp2",
    "tp2_pp2_dp16_ep8",
    "pp16_dp64_ep64_vp2",
    "pp16_dp16_ep8",
]
EXPERT_LAYOUTS += ["pp8_dp8_ep8"]
AS_PUBLISHED = {"gpt_1t_3072xa100": 0.11}
"""Recipes that repeat a published layout with a larger bubble than others may have, and its
bubble."""

ROOM = 0.8
"""How much of a GPU's memory a recipe may be predicted to need; the rest is for communication,
workspaces and holes."""


# Recipes


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_the_checks(name: str) -> None:
    """The planner's too: none uses the share of memory that proposals leave free."""
    assert recipe(name)[1].warnings == ()


def test_there_are_recipes_for_all_published_models() -> None:
    models = {recipe(name)[0].model.name for name in RECIPES}
    assert models >= set(PUBLISHED)
    assert {recipe(name)[1].layout.name for name in ON_GPUS} == {*LAYOUTS, *EXPERT_LAYOUTS}
    assert {"llama3_70b_256xa100", "llama3_70b_512xh100", "llama3_70b_1024xh100"} <= set(RECIPES)


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_recipe_is_what_its_name_says_and_fills_its_cluster(name: str) -> None:
    config, plan = recipe(name)
    found = re.fullmatch(
        r"(?P<model>\w+?)(?:_finetune|_lora)?(?:_(?P<context>\d+)k)?_(?P<ranks>\d+)x(?P<kind>[a-z]+\d+)",
        name,
    )
    assert found is not None and config.model.name == found["model"]
    assert found["context"] is None or config.data.sequence_length == int(found["context"]) * 1024
    assert (
        plan.layout.world_size
        == int(found["ranks"])
        == config.cluster.nodes * config.cluster.gpus_per_node
    )
    assert (
        config.cluster.name
        == f"{found['kind']}_{config.cluster.nodes}x{config.cluster.gpus_per_node}"
    )
    assert (plan.accelerator, plan.precision) == ("gpu", "bf16")
    assert plan.layout.tp <= config.cluster.nvlink_gpus
    bubble = predicted_bubble(
        find_schedule(plan.schedule), plan.layout.pp, plan.layout.vp, plan.micro_batches
    )
    assert bubble < 0.06 or bubble == pytest.approx(AS_PUBLISHED.get(name), abs=0.005)


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_recipe_says_why_and_how(name: str) -> None:
    """A comment on its layout and its command line; and the tokens of a step, which are those of
    the numbers beside it."""
    text = (recipes_folder() / f"{name}.yaml").read_text()
    comment = re.match(r"# @package _global_\n((?:#.*\n)+)", text)
    config, _ = recipe(name)
    files = "data.path=" if config.data.name == "instructions" else "data.train_path="
    assert (
        comment is not None
        and f"train.py recipe={name} " in comment[1]
        and f" {files}" in comment[1]
    )
    tokens = config.data.sequence_length * config.data.global_batch_size
    millions = re.search(r"global_batch_size: .*# ([\d.]+) million tokens a step", text)
    assert millions is not None and tokens == pytest.approx(float(millions[1]) * 1e6, rel=0.06)
    total = re.search(r"max_steps: .*# ([\d.]+) (trillion|billion) tokens", text)
    assert total is not None
    assert tokens * config.trainer.max_steps == pytest.approx(
        float(total[1]) * {"trillion": 1e12, "billion": 1e9}[total[2]], rel=0.06
    )


@pytest.mark.parametrize(
    "name", [name for name in ON_GPUS if "_finetune_" in name or "_lora_" in name]
)
def test_a_recipe_for_finetuning_starts_from_a_folder(name: str) -> None:
    config = composed(f"recipe={name}", "cluster=local_cpu")
    config.data.update(
        {"path": "here"} if config.data.name == "instructions" else {"train_path": "here"}
    )
    assert (config.model.lora.r is not None) == ("_lora_" in name)
    assert " model.pretrained=/" in (recipes_folder() / f"{name}.yaml").read_text()
    assert recipe(name)[1].model["pretrained"] is None, "a dry run needs no folder"
    with pytest.raises(ConfigError, match="Set model.pretrained=PATH"):
        plan_run(config)


def stage_parameters(spec: ModelSpec, layout: Layout) -> tuple[float, float]:
    """(others, those of dealt experts) of the largest rank: an even share of the blocks, and an
    embedding or a head beside them."""
    embedding = spec.vocab * spec.hidden
    assert spec.parameters is not None and spec.shapes is not None
    experts = (
        sum(prod(shape) for shape in spec.shapes.values() if len(shape) == 3)
        if layout.ep > 1
        else 0
    )
    matrices = 1 if spec.tied else 2
    outside = matrices * embedding if layout.pp == 1 else embedding
    others = (spec.parameters - experts - matrices * embedding) / layout.pp + outside
    return others / layout.tp, experts / layout.pp / layout.ep


def state_bytes(parameters: float, experts: float, trained: float, plan: RunPlan) -> float:
    """Of one rank with bf16 parameters and AdamW, at its largest: the table of docs/zero.md. Those
    of experts are reduced once a step.

    Args:
        trained: how many of `parameters` are.
    """
    layout = plan.layout
    same = layout.tp * layout.dp * layout.cp / layout.ep  # ranks of a stage with the same experts
    of_experts = experts * (2 + 8 + 12 / (same if plan.zero.stage else 1))
    optimizer = 12 * trained / (layout.dp * layout.cp if plan.zero.stage else 1)
    # the gradients, and beside them for a moment the copy that is reduced
    if plan.zero.reduce == "step":
        return 2 * parameters + 8 * trained + optimizer + of_experts
    buckets = 3 * 32 * 2**20
    return 2 * parameters + 4 * trained / layout.dp + buckets + optimizer + of_experts


def activation_bytes(spec: ModelSpec, plan: RunPlan, tokens: int, parts: int) -> float:
    """Of one rank, with bf16 activations of a block in the style of Llama, roughly.

    In bytes of a token: the float32 and bf16 copies of two norms and the residuals, 20 h, four
    tensors as wide as the MLP and four as wide as all heads, of 2 bytes. Tensor-parallel ranks
    share all of them, with sequence parallelism. A mixture has the MLPs that see a token, with even
    loads, and for each of them four copies of the token, on its way and back. Compiled dense blocks
    keep the residuals, three tensors as wide as the MLP, and four as wide as all heads. With
    selective recomputation a block keeps its input, the sum behind attention, queries, keys, values
    and the output of attention, and two tensors as wide as the MLP.
    """
    layout, blocks = plan.layout, plan.blocks
    assert blocks.sequence_parallel is None
    heads, kv_heads = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    everything = (
        tokens
        * (20 * spec.hidden + 8 * mlp_width(spec) + 8 * heads + 8 * spec.top_k * spec.hidden)
        / layout.tp
    )
    if blocks.compile:
        assert not spec.experts
        everything = tokens * (4 * spec.hidden + 6 * mlp_width(spec) + 8 * heads) / layout.tp
    selected = (
        tokens * (4 * spec.hidden + 4 * heads + 4 * kv_heads + 4 * mlp_width(spec)) / layout.tp
    )
    kept = {
        "none": everything,
        "selective": min(everything, selected),
        "full": tokens * 2 * spec.hidden / layout.tp,
    }[blocks.recompute]
    held = layout.pp  # stages' forwards before the first backward, on the first rank
    if layout.vp > 1:
        held = 2 * (layout.pp - 1) + (layout.vp - 1) * layout.pp + 1
    count = ceil(spec.layers / (layout.pp * layout.vp)) * held
    recomputed = ceil(count / blocks.recompute_every)
    again = everything if blocks.recompute != "none" else 0
    # bf16, float32, and their gradient
    logits = tokens * spec.vocab / layout.tp * (2 + 4 + 4) / parts
    return recomputed * kept + (count - recomputed) * everything + again + logits


def mlp_width(spec: ModelSpec) -> int:
    """Of all MLPs of a block that see a token."""
    if not spec.experts or spec.shapes is None:
        return spec.intermediate
    last = f"model.layers.{spec.layers - 1}.mlp."
    shared = sum(
        shape[0]
        for name, shape in spec.shapes.items()
        if name.startswith(f"{last}shared") and name.endswith("up_proj.weight")
    )
    return spec.top_k * spec.shapes[f"{last}experts.down_proj"][2] + shared


def predicted_bytes(config: DictConfig, plan: RunPlan) -> tuple[float, float]:
    """(state, activations) of the fullest rank."""
    spec = read_spec(OmegaConf.to_container(config.model.config))  # type: ignore[arg-type]
    tokens = plan.micro_batch_size * config.data.sequence_length // plan.layout.cp
    (parameters, experts), rank = stage_parameters(spec, plan.layout), config.model.lora.r
    trained = (
        parameters
        if rank is None
        else rank * sum(sum(shape) for shape in (spec.shapes or {}).values() if len(shape) == 2)
    )
    parts = 8 if config.parallelism.loss_chunks == "auto" else config.parallelism.loss_chunks
    return state_bytes(parameters, experts, trained, plan), activation_bytes(
        spec, plan, tokens, parts
    )


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_recipe_fits_the_memory_of_its_gpus(name: str) -> None:
    config, plan = recipe(name)
    state, activations = predicted_bytes(config, plan)
    assert state < 0.6 * config.cluster.memory
    assert state + activations < ROOM * config.cluster.memory


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3_70b_256xa100", {"recompute": "none", "recompute_every": 1}),
        ("llama3_70b_256xa100", {"layout": "tp8_dp32"}),
        ("llama3_1_8b_8xh100", {"zero_stage": 0}),
        ("llama3_1_8b_64xh100", {"layout": "dp64"}),
        ("qwen2_5_32b_128xh100", {"layout": "tp2_pp4_dp16"}),
        ("mixtral_8x7b_64xh100", {"layout": "dp64_ep8"}),
        ("llama3_1_8b_finetune_8xh100", {"zero_stage": 0}),
        ("llama3_70b_finetune_64xa100", {"layout": "tp8_pp2_dp4", "recompute": "none"}),
    ],
    ids=str,
)
def test_without_what_its_comment_gives_reasons_for_it_would_not_fit(
    name: str, change: dict[str, object]
) -> None:
    config = deepcopy(recipe(name)[0])
    config.parallelism.update(change)
    assert sum(predicted_bytes(config, plan_run(config))) > ROOM * config.cluster.memory


COMMANDS = ["recipe={} --cfg job", "recipe={} trainer.dry=true"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["llama3_70b_1024xh100"], id="largest"),
        pytest.param(RECIPES, id="all", marks=pytest.mark.full),
    ],
)
def test_recipes_on_the_command_line(names: list[str]) -> None:
    lines = [command.format(name) for name in names for command in COMMANDS]
    for line, result in zip(
        lines, run_commands([["train", *line.split()] for line in lines]), strict=True
    ):
        assert (result.code, result.left) == (0, []), f"{line}: {result.output}"
        config, plan = recipe(line.split()[0].removeprefix("recipe="))
        assert (
            f"layout: {config.parallelism.layout}\n" in result.output
            if "--cfg" in line
            else result.output == f"{plan.describe()}\n"
        )


# Clusters


@pytest.mark.parametrize(
    ("kind", "nodes", "gpus"),
    [("a100_80gb", 1, 1), ("gb200", 18, 4), ("h100_sxm", 128, 8), ("h200", 3, 5)],
)
def test_any_number_of_nodes_of_a_kind(kind: str, nodes: int, gpus: int) -> None:
    config, plan = dry(
        f"cluster={kind}_{nodes}x{gpus}",
        f"parallelism=dp{nodes * gpus}",
        f"data.global_batch_size={nodes * gpus * 2}",
    )
    assert (config.cluster.name, config.cluster.nodes, config.cluster.gpus_per_node) == (
        f"{kind}_{nodes}x{gpus}",
        nodes,
        gpus,
    )
    alone = composed(f"cluster={kind}").cluster
    assert {
        key: config.cluster[key]
        for key in config.cluster
        if key not in ("name", "nodes", "gpus_per_node")
    } == {key: alone[key] for key in alone if key not in ("name", "nodes", "gpus_per_node")}
    assert plan.accelerator == "gpu"


def test_short_names_of_kinds() -> None:
    for short, kind in (("h100", "h100_sxm"), ("a100", "a100_80gb")):
        assert composed(f"cluster={short}_4x8").cluster == {
            **composed(f"cluster={kind}_4x8").cluster,
            "name": f"{short}_4x8",
        }


def test_numbers_of_a_cluster_may_be_keys() -> None:
    config, plan = dry("cluster=h100_4x8", "cluster.nodes=2", "parallelism=tp8_dp2")
    assert (config.cluster.name, plan.layout.world_size) == ("h100_2x8", 16)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_a_kind_have_a_source_and_are_plausible(kind: str) -> None:
    lines = (conf_folder() / "cluster" / f"{kind}.yaml").read_text().splitlines()
    assert [
        line
        for line in lines
        if re.search(r": [\d.]+e?\+?\d*\b", line) and not re.search(r"^nodes:|# .*\[\d\]", line)
    ] == []
    cluster = check_keys(composed(f"cluster={kind}")).cluster
    rates = cluster.peak_flops
    assert (
        cluster.memory
        and cluster.memory_bandwidth
        and cluster.intra_node.bandwidth
        and cluster.inter_node.bandwidth
    )
    assert rates.bf16 and rates.tf32
    assert (
        10e9
        < cluster.inter_node.bandwidth
        < cluster.intra_node.bandwidth
        < cluster.memory_bandwidth
        < 10e12
    )
    assert rates.fp16 == rates.bf16 == pytest.approx(2 * rates.tf32, rel=1e-3)
    assert (rates.fp8 is None) == (kind == "a100_80gb") and rates.fp8 in (None, 2 * rates.bf16)
    assert rates.fp32 is None or rates.fp32 < rates.tf32
    assert 40e9 <= cluster.memory < 300e9


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=h100_0x8"], "cluster.nodes must be at least 1; got 0"),
        (["cluster=h100_2x0"], "cluster.gpus_per_node must be at least 1; got 0"),
        (["cluster=h100_2x8"], "8 ranks, but the cluster h100_2x8 has 16 GPUs"),
        (
            ["cluster=h100_1x8", "cluster.memory_bandwidth=0"],
            "cluster.memory_bandwidth must be a finite number of at least 1; got 0.0",
        ),
        (
            ["cluster=h100_1x8", "cluster.inter_node.latency=-1"],
            "inter_node.latency must be a finite number of at least 0; got -1.0",
        ),
        (
            ["cluster=h100_1x8", "cluster.peak_flops.bf16=nan"],
            "cluster.peak_flops.bf16 must be a finite number of at least 1; got nan",
        ),
        (
            ["cluster=h100_1x8", "+cluster.peak_flops.fp4=1e15"],
            '"cluster.peak_flops.fp4".* Did you mean "cluster.peak_flops.fp8"',
        ),
        (["cluster=h100_1x8", "+cluster.link=1"], '"cluster.link"'),
        (
            ["cluster=a100_1x8", "precision=fp8"],
            "fp8 needs GPUs with float8 .* the cluster a100_1x8 have none",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_clusters_that_cannot_be_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=message):
        dry(*overrides)


def test_fp8_passes_on_clusters_that_have_it() -> None:
    assert dry("cluster=h100_1x8", "precision=fp8")[1].precision == "fp8"


def test_kinds_of_another_app_take_numbers_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults:\n  - cluster: mine_3x4\n")
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("accelerator: gpu\nnodes: 1\nspeed: 7\n")
    assert composed(folder=tmp_path).cluster == {
        "accelerator": "gpu",
        "nodes": 3,
        "speed": 7,
        "name": "mine_3x4",
        "gpus_per_node": 4,
    }


# Weight decay


@pytest.mark.parametrize("name", options("optimizer"))
def test_no_optimizer_decays_norms_and_biases(name: str) -> None:
    assert {"norm", "bias"} <= set(
        OmegaConf.load(conf_folder() / "optimizer" / f"{name}.yaml").no_decay
    )


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_decays_norms_and_biases(name: str) -> None:
    assert {"norm", "bias"} <= set(recipe(name)[0].optimizer.no_decay)


@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("tiny")])
def test_what_is_not_decayed_is_every_vector_of_a_model(name: str) -> None:
    """By the shapes: norms and biases are vectors, and nothing else is. GPT-OSS also stacks biases
    of experts, and has sinks."""
    config = OmegaConf.to_container(OmegaConf.load(conf_folder() / "model" / f"{name}.yaml").config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(config))
    named = {
        parameter: value
        for parameter, value in model.named_parameters()
        if not parameter.endswith("sinks")
    }
    vectors = {
        parameter
        for parameter, value in named.items()
        if value.ndim < 2 or parameter.endswith("_proj_bias")
    }
    assert vectors and undecayed_names(model, ["norm", "bias"]) == vectors
