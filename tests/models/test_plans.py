"""Plans are read from Transformers, from a class, or from the user; what does not fit is refused by
name."""

import models
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from lightning_3d.errors import LayoutError, PlanError
from lightning_3d.models.parallel_plan import Cut, ParallelPlan, find_pipeline_module, read_plan
from lightning_3d.models.plan_pairs import require_pairs
from lightning_3d.options.own_model import OwnModelOptions
from lightning_3d.parallel.expert import expert_specs
from lightning_3d.parallel.tensor import shard_specs


@pytest.fixture(autouse=True)
def on_meta() -> None:
    """Plans need names and shapes only."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize(
    ("name", "layers", "before", "norm"),
    [
        ("llama", "model.layers", ("model.embed_tokens",), "model.norm"),
        ("gemma3", "model.layers", ("model.embed_tokens",), "model.norm"),
        (
            "gpt_neox",
            "gpt_neox.layers",
            ("gpt_neox.embed_in", "gpt_neox.emb_dropout"),
            "gpt_neox.final_layer_norm",
        ),
    ],
)
def test_the_plan_of_a_family_names_its_blocks_in_order(
    name: str, layers: str, before: tuple, norm: str
) -> None:
    model = models.build(name)
    plan = read_plan(model)
    assert plan.head is not None
    assert model.get_submodule(plan.head) is model.get_output_embeddings()
    assert (plan.layers, plan.before, plan.after) == (layers, before, (norm, plan.head))
    assert plan.embedding == before[0]


@pytest.mark.parametrize("name", sorted(models.FAMILIES))
def test_every_matrix_of_a_family_is_cut(name: str) -> None:
    model = models.build(name)
    specs = shard_specs(model, read_plan(model), 2, 0)
    whole = {key for key, spec in specs.items() if not spec.is_cut and len(spec.global_shape) == 2}
    replicated_heads = {key for key in whole if specs[key].tp_grad_sum}
    assert whole == replicated_heads
    assert bool(replicated_heads) == (name == "gemma3")  # one key head on two ranks


def test_a_hand_written_plan_is_relative_to_the_model_and_finds_the_token_embedding() -> None:
    plan = read_plan(models.build(models.PLAIN), models.PlainModel.plan)
    assert plan.layers == "blocks"
    assert (plan.before, plan.after) == (("embed",), ("norm", "head"))
    assert (plan.embedding, plan.head) == ("embed.token", "head")


def test_a_last_layer_that_makes_no_logits_stays_whole_unless_the_plan_cuts_it() -> None:
    """That of a regression has one row, which tp ranks could not share."""
    model = models.PlainModel(layers=2)
    model.head = nn.Linear(32, 1)
    tp = {name: style for name, style in models.PlainModel.plan["tp"].items() if name != "head"}
    plan = read_plan(model, {**models.PlainModel.plan, "tp": tp})
    assert (plan.embedding, plan.head) == (None, None)
    specs = shard_specs(model, plan, 2, 0)
    assert not specs["head.weight"].is_cut and specs["blocks.0.up.weight"].is_cut
    model.head = nn.Linear(32, 6)
    assert read_plan(model, models.PlainModel.plan).head == "head"


def test_a_plan_can_be_an_attribute_of_a_plain_class() -> None:
    class Declared(models.PlainModel):
        _tp_plan = models.PlainModel.plan["tp"]
        _pp_plan = models.PlainModel.plan["pp"]

    assert read_plan(Declared(2)) == read_plan(models.PlainModel(2), models.PlainModel.plan)


def test_what_the_user_sets_on_a_transformers_model_wins() -> None:
    model = models.build("llama")
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.gate_proj": "colwise_gather_output"}
    assert read_plan(model).tp["model.layers.*.mlp.gate_proj"] == Cut("colwise_gather_output")


def test_names_of_older_versions_are_understood() -> None:
    plan = read_plan(
        models.build(models.PLAIN),
        {"tp": {"blocks.*.up": "colwise_rep", "blocks.*.down": "rowwise_rep"}},
    )
    assert {cut.style for cut in plan.tp.values()} >= {
        "colwise_gather_output",
        "rowwise_split_input",
    }


def test_an_exact_name_wins_over_a_pattern() -> None:
    plan = ParallelPlan({"blocks.*.q": Cut("colwise"), "blocks.3.q": Cut("replicate")})
    assert plan.cut_of("blocks.3.q") == Cut("replicate")
    assert plan.cut_of("blocks.2.q") == Cut("colwise")
    assert plan.cut_of("blocks.2.inner.q") is None


def test_an_embedding_that_the_plan_replicates_stays_whole_with_its_tied_head() -> None:
    model = models.build("qwen2")
    declared = {**model.config.base_model_tp_plan}
    tp = {f"model.{pattern}": style for pattern, style in declared.items()} | {
        "model.embed_tokens": "replicate"
    }
    plan = read_plan(model, {"tp": tp})
    assert (plan.embedding, plan.head) == (None, None)
    specs = shard_specs(model, plan, 2, 1)
    assert not specs["lm_head.weight"].is_cut
    assert specs["lm_head.weight"].tied_to == "model.embed_tokens.weight"


class User(nn.Module):
    """A LightningModule's place."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def test_the_pipelined_module_is_the_outermost_one_with_a_plan() -> None:
    model = models.build("llama")
    user = User(loss=nn.Linear(2, 2), net=User(language_model=model))
    assert find_pipeline_module(user) == ("net.language_model", model)
    assert find_pipeline_module(model) == ("", model)


def test_two_modules_with_a_plan_must_be_told_apart() -> None:
    user = User(student=models.build("llama"), teacher=models.build("llama"))
    with pytest.raises(PlanError, match="student, teacher.*pipeline_module='student'"):
        find_pipeline_module(user)
    assert find_pipeline_module(user, "teacher")[1] is user.teacher


def test_a_users_plan_belongs_to_the_module_that_has_its_names() -> None:
    user = User(model=models.build(models.PLAIN))
    assert find_pipeline_module(user, user_plan=models.PlainModel.plan)[0] == "model"
    with pytest.raises(PlanError, match="has all the names"):
        find_pipeline_module(
            user, user_plan=models.PlainModel.plan | {"tp": {"blocks.*.query": "colwise"}}
        )


def test_a_plan_with_a_wrong_name_is_explained_by_the_module_that_has_the_others() -> None:
    user = User(loss=nn.Linear(2, 2), model=models.build(models.PLAIN))
    plan = models.PlainModel.plan
    names = {*plan["pp"], *plan["tp"]}
    [wrong, *_] = plan["tp"]
    misspelt = {
        "pp": plan["pp"],
        "tp": {f"{name}x" if name == wrong else name: style for name, style in plan["tp"].items()},
    }
    with pytest.raises(PlanError) as refused:
        find_pipeline_module(user, user_plan=misspelt)
    assert (
        f"'model' (PlainModel) has {len(names) - 1} of the {len(names)}, but '{wrong}x' matches no"
        in str(refused.value)
    )
    assert f'Did you mean "{wrong}"?' in str(refused.value)
    with pytest.raises(PlanError, match="has any of the names"):
        find_pipeline_module(user, user_plan={"tp": {"h.*.attn": "colwise"}})


def test_half_a_pair_is_refused_before_anything_is_built() -> None:
    model, plan = models.build(models.PLAIN), models.PlainModel.plan
    for kept, alone in (("colwise", "rowwise"), ("rowwise", "colwise")):
        half = {
            name: style
            for name, style in plan["tp"].items()
            if getattr(style, "style", style) == kept
        }
        with pytest.raises(
            PlanError, match=f"with the style '{kept}', but no '{alone}' layer of the same block"
        ):
            read_plan(model, plan | {"tp": half})


@pytest.mark.parametrize(
    ("styles", "alone"),
    [
        ({"a.q": "colwise", "a.o": "rowwise", "up": "colwise", "down": "rowwise"}, []),
        ({"a.q": "colwise", "a.o": "rowwise", "m.up": "colwise"}, ["b.0.m.up"]),
        ({"a.q.linear": "packed_colwise", "a.k.linear": "colwise", "out.linear": "rowwise"}, []),
        ({"a.q": "colwise_gather_output", "a.n": "replicate"}, []),
        ({"a.q": "colwise", "a.o": "rowwise", "down": "rowwise"}, ["b.0.down"]),
    ],
)
def test_pairs_are_closed_by_the_smallest_module_around_them(
    styles: dict[str, str], alone: list[str]
) -> None:
    named = {f"b.0.{name}": style for name, style in styles.items()}
    if not alone:
        require_pairs(named, ["b.0", "b.1"])
        return
    with pytest.raises(PlanError, match=alone[0].replace(".0.", r".\*.")):
        require_pairs(named, ["b.0"])


def test_a_module_without_a_plan_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        PlanError, match=r"Linear \(the 'model' of User\) declares no parallel plan, .* pass plan="
    ):
        find_pipeline_module(User(model=nn.Linear(2, 2)))
    with pytest.raises(PlanError, match="Linear declares no parallel plan"):
        read_plan(nn.Linear(2, 2))
    with pytest.raises(PlanError, match="'modle' is not a module.*model"):
        find_pipeline_module(User(model=models.build("llama")), "modle")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tp": {"blocks.*.q": "columnwise"}}, "'columnwise', which is not supported.*colwise"),
        ({"tp": {"blocks.*.qq": "colwise"}}, "'blocks.*.qq' matches no module.*blocks.*.q"),
        ({"pp": {"blocks": (), "nrom": ()}}, "'nrom', which is not a module.*norm"),
        ({"pp": {"embed": (), "head": ()}}, "exactly one list of blocks.*names none"),
        ({"pipeline": {}}, "keys of a plan must be 'tp', 'pp' or 'ep'"),
    ],
)
def test_a_plan_with_a_mistake_is_refused(plan: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_plan(models.build(models.PLAIN), plan)


def test_a_style_that_is_unknown_matters_only_to_layouts_that_use_it() -> None:
    model = models.build("llama")
    model._tp_plan = {"model.layers.*.mlp": "invented"}
    plan = read_plan(model)
    assert shard_specs(model, plan, 1, 0)
    with pytest.raises(PlanError, match="'invented', which is not supported"):
        shard_specs(model, plan, 2, 0)


def test_what_the_blocks_read_and_others_return_travels_with_the_hidden_states() -> None:
    blocks = ["hidden", "first", "b"], ["hidden", "a", "b"]
    entries = {"embed": (["tokens"], ["hidden", "first"]), "blocks": blocks, "norm": (), "head": ()}
    plan = read_plan(models.build(models.PLAIN), {"pp": entries})
    assert (plan.carried, plan.sides) == (("embed",), (1,))
    declared = read_plan(models.build("llama"))
    assert (declared.carried, declared.sides) == ((), ())


def test_a_list_of_blocks_is_a_module_list_else_a_chain() -> None:
    chain, blocks = (
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        nn.ModuleList([nn.Linear(2, 2)]),
    )
    order = {"pp": {"first": (), "blocks": (), "last": ()}}
    model = nn.ModuleDict(
        {"first": nn.Sequential(nn.Linear(2, 2)), "blocks": blocks, "last": nn.Linear(2, 2)}
    )
    assert (read_plan(model, order).layers, read_plan(model, order).before) == (
        "blocks",
        ("first",),
    )
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "blocks": chain, "last": nn.Linear(2, 2)})
    assert (read_plan(model, order).layers, read_plan(model, order).after) == ("blocks", ("last",))
    model = nn.ModuleDict(
        {"first": nn.Sequential(nn.Linear(2, 2)), "blocks": chain, "last": nn.Linear(2, 2)}
    )
    with pytest.raises(PlanError, match="exactly one list of blocks.*names first, blocks"):
        read_plan(model, order)


def test_experts_are_cut_or_dealt() -> None:
    """Over tensor-parallel ranks each expert is cut; with expert parallelism, experts are dealt out
    whole."""
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model = MixtralForCausalLM(config)
    plan = read_plan(model)
    experts = "model.layers.0.mlp.experts"
    assert plan.experts == (experts,)
    shapes = {name: spec.local_shape for name, spec in shard_specs(model, plan, 2, 0).items()}
    assert (shapes[f"{experts}.gate_up_proj"], shapes[f"{experts}.down_proj"]) == (
        (4, 16, 16),
        (4, 16, 8),
    )
    dealt = expert_specs(model, plan.for_experts(2, model), ep_size=2, ep_index=1, tp_index=0)
    assert {name: spec.boxes[0].global_offset for name, spec in dealt.items()} == {
        f"{experts}.gate_up_proj": (2, 0, 0),
        f"{experts}.down_proj": (2, 0, 0),
    }
    assert all(spec.expert and spec.local_shape[0] == 2 for spec in dealt.values())
    whole = shard_specs(model, plan.for_experts(2, model), 2, 0)
    assert not whole[f"{experts}.gate_up_proj"].is_cut


def test_expert_parallelism_needs_a_plan_for_experts() -> None:
    dense = tiny_llama(num_attention_heads=4)
    with pytest.raises(PlanError, match="LlamaForCausalLM is dense: it has no experts"):
        read_plan(dense).for_experts(2, dense)


def tiny_llama(**settings: int) -> LlamaForCausalLM:
    sizes = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**(sizes | settings)))


@pytest.mark.parametrize(
    ("settings", "tp", "message"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            2,
            "tp=2 does not fit .*q_proj', which has 3 heads.*tp that works is 1",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            3,
            "k_proj', which has 2 heads.*multiple of 2.*tp that works is 2",
        ),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 5},
            4,
            "tp=4 is too many for the 5 rows",
        ),
    ],
)
def test_f02_f04_heads_and_rows_that_tp_does_not_fit_are_refused(
    settings: dict, tp: int, message: str
) -> None:
    model = tiny_llama(**settings)
    with pytest.raises(LayoutError, match=message):
        shard_specs(model, read_plan(model), tp, 0)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", models.MODELS)
def test_shards_tile_every_parameter_exactly(name: str, tp: int) -> None:
    model = models.build(name)
    plan = read_plan(model, models.PlainModel.plan if name == models.PLAIN else None)
    tables = [shard_specs(model, plan, tp, rank) for rank in range(tp)]
    for key, parameter in model.named_parameters(remove_duplicate=False):
        covered = torch.zeros(parameter.shape, dtype=torch.int, device="cpu")
        for rank, table in enumerate(tables):
            spec = table[key]
            assert rank in spec.tp_replicas
            assert spec.global_shape == tuple(parameter.shape)
            assert all(tables[other][key].boxes == spec.boxes for other in spec.tp_replicas)
            if rank == min(spec.tp_replicas):
                for box in spec.boxes:
                    covered[box.global_slices()] += 1
        assert bool((covered == 1).all()), key


def test_f03_key_heads_fewer_than_ranks_are_replicated_on_neighbours() -> None:
    model = tiny_llama(num_attention_heads=4, num_key_value_heads=2)
    tables = [shard_specs(model, read_plan(model), 4, rank) for rank in range(4)]
    specs = [table["model.layers.0.self_attn.k_proj.weight"] for table in tables]
    assert [spec.tp_replicas for spec in specs] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [spec.tp_grad_sum for spec in specs] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert specs[0].local_shape == (6, 24)


class NoSuper(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight)


@pytest.mark.parametrize(
    ("layer", "style", "message"),
    [
        (nn.Conv1d(4, 4, 1), "colwise", "for nn.Linear, but it is a Conv1d"),
        (nn.Linear(4, 4), "embedding_rowwise", "for nn.Embedding, but it is a Linear"),
        (NoSuper(4, 4), "rowwise", "NoSuper.forward does not call super"),
        (nn.Embedding(4, 4, max_norm=1.0), "embedding_rowwise", "max_norm"),
    ],
)
def test_a_layer_that_a_style_does_not_fit_is_refused(
    layer: nn.Module, style: str, message: str
) -> None:
    model = User(layer=layer)
    with pytest.raises(PlanError, match=message):
        shard_specs(model, read_plan(model, {"tp": {"layer": style}}), 2, 0)


def test_tied_parameters_must_be_cut_alike() -> None:
    model = User(a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.b.weight = model.a.weight
    with pytest.raises(PlanError, match="'b.weight' and 'a.weight' are one tied parameter"):
        shard_specs(model, read_plan(model, {"tp": {"a": "colwise", "b": "rowwise"}}), 2, 0)


def test_a_plan_without_a_tensor_parallel_part_is_refused_with_tp() -> None:
    model = models.build(models.PLAIN)
    plan = read_plan(model, {"pp": models.PlainModel.plan["pp"]})
    assert shard_specs(model, plan, 1, 0)
    with pytest.raises(PlanError, match="declares no tensor-parallel plan"):
        shard_specs(model, plan, 2, 0)


def test_a_plan_of_omegaconf_is_a_dictionary() -> None:
    """As Hydra passes it without `_convert_: all`."""
    given = OmegaConf.create({"tp": {"h.*.up": "colwise"}, "pp": {"h": [["x"], ["x"]]}})
    plan = OwnModelOptions(plan=given).plan
    assert (
        plan == {"tp": {"h.*.up": "colwise"}, "pp": {"h": [["x"], ["x"]]}}
        and type(plan["pp"]["h"][0]) is list
    )


def test_a_plan_of_a_file_may_have_the_fields_of_a_cut() -> None:
    entry = {"style": "packed_colwise", "units": 4, "parts": [32, 32, 32]}
    given = OmegaConf.create(
        {"tp": {"transformer.h.*.attn.c_attn": entry, "transformer.h.*.attn.c_proj": "rowwise"}}
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
    found = read_plan(model, OwnModelOptions(plan=given).plan).tp
    assert found["transformer.h.*.attn.c_attn"] == Cut(
        "packed_colwise", units=4, parts=(32, 32, 32)
    )
    for change, message in (
        ({"unit": 4}, "has no field 'unit'. Fields are style, units, parts, shared"),
        ({}, "has no style"),
    ):
        with pytest.raises(PlanError, match=message):
            read_plan(
                model,
                {
                    "tp": {
                        "transformer.h.*.attn.c_attn": (
                            {"style": "colwise"} | change if change else {"units": 4}
                        )
                    }
                },
            )
