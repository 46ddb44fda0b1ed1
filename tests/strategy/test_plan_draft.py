"""A plan that is drafted from a model's data flow: it trains as one process does, or says what
cannot be derived."""

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import foreign_gpts
import own_gpt
import pytest
import torch
from foreign_gpts import NanoGPT, with_attention, with_mlp
from own_gpt import GPT, HEADS, WIDTH, Text, one_process
from ranks import run_ranks
from torch import nn

from lightning_3d import Cut, Lightning3DStrategy
from lightning_3d.engine.plan_draft import Draft, auto, draft_plan
from lightning_3d.engine.plan_draft.auto import where_it_works, with_draft
from lightning_3d.engine.plan_draft.data_flow import DataFlow
from lightning_3d.engine.plan_draft.draft import parameters_to_run
from lightning_3d.engine.plan_draft.inputs import Inputs
from lightning_3d.engine.plan_draft.text import as_python
from lightning_3d.errors import ConfigError, NoPlanError, PlanError
from lightning_3d.layout import Layout

Make = Callable[[], nn.Module]


@functools.cache
def draft(make: Make, tp: int = 2) -> Draft:
    return draft_plan(Text(make()), tp)


def fused() -> nn.Module:
    return foreign_gpts.LitGPT(mlp=foreign_gpts.FusedMLP)


MODELS: dict[str, Make] = {
    "nano": NanoGPT,
    "min": foreign_gpts.MinGPT,
    "lit": foreign_gpts.LitGPT,
    "lit_fused": fused,
    "x": foreign_gpts.XTransformer,
}


# Plans


def test_packed_queries_keys_and_values_are_found_with_their_heads() -> None:
    found = draft(NanoGPT)
    assert found.name == "net" and not any(found.problems.values())
    assert found.plan["tp"] == {
        "transformer.h.*.attn.c_attn": Cut("packed_colwise", units=HEADS, parts=(WIDTH,) * 3),
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.0": "colwise",
        "transformer.h.*.mlp.2": "rowwise",
    }
    assert list(found.plan["pp"]) == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h",
        "transformer.ln_f",
        "lm_head",
    ]


def test_groups_of_heads_next_to_each_other_are_one_matrix_and_a_fused_gate_two() -> None:
    tp = draft(fused).plan["tp"]
    assert tp["transformer.h.*.attn.attn"] == "colwise"
    assert tp["transformer.h.*.mlp.gate_up"] == Cut("packed_colwise", parts=(64, 64))


def test_one_key_head_is_shared_and_norms_of_heads_get_the_gradients_of_all() -> None:
    tp = draft(foreign_gpts.XTransformer).plan["tp"]
    assert tp["attn_layers.layers.*.fn.to_kv"] == Cut("colwise", units=1, shared=True)
    assert {tp[f"attn_layers.layers.*.fn.{name}_norm"] for name in "qk"} == {
        "replicated_with_grad_allreduce"
    }


def test_text_of_a_draft_is_the_plan() -> None:
    for make in (NanoGPT, foreign_gpts.XTransformer):  # with packed matrices, and with shared ones
        found, names = draft(make), dict[str, Any]()
        exec(as_python(found), names)
        assert names["plan"] == found.plan


def test_drafting_changes_neither_the_module_nor_the_random_numbers() -> None:
    module = Text(NanoGPT())
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    draft_plan(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in vars(child) for child in module.modules())


def test_model_on_the_meta_device_has_the_same_draft() -> None:
    with torch.device("meta"):
        module = Text(NanoGPT())
    assert draft_plan(module).plan == draft(NanoGPT).plan


def other_attentions() -> dict[str, type[nn.Module]]:
    return {
        kind.__name__: kind for kind in (own_gpt.Attention, own_gpt.NamedHeads, own_gpt.SharedKeys)
    }


@pytest.mark.full
@pytest.mark.parametrize("name", other_attentions())
def test_separate_queries_keys_and_values_need_no_numbers(name: str) -> None:
    found = draft_plan(Text(GPT(other_attentions()[name], tied=True)))
    assert found.plan == own_gpt.PLAN | {"pp": found.plan["pp"]}
    assert list(found.plan["pp"]) == list(own_gpt.PLAN["pp"])


class Chain(nn.Module):
    """Low-rank queries and keys, as in DeepSeek: what the norms between read must be whole."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_b = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.kv_a, self.kv_b = nn.Linear(WIDTH, 10), nn.Linear(10, 2 * WIDTH)
        self.q_norm, self.kv_norm, self.out, self.h = (
            nn.RMSNorm(12),
            nn.RMSNorm(10),
            nn.Linear(WIDTH, WIDTH),
            HEADS,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, kv = self.q_b(self.q_norm(self.q_a(x))), self.kv_b(self.kv_norm(self.kv_a(x)))
        q, kv = (part.unflatten(-1, (self.h, -1)).transpose(1, 2) for part in (q, kv))
        return self.out(own_gpt.attend(q, *kv.chunk(2, -1)))


def test_layers_before_a_norm_stay_whole_and_the_next_pair_is_sharded() -> None:
    found = draft_plan(Text(GPT(Chain)))
    assert {name: cut for name, cut in found.plan["tp"].items() if ".attn." in name} == {
        "h.*.attn.q_b": "colwise",
        "h.*.attn.kv_b": "colwise",
        "h.*.attn.out": "rowwise",
    }
    assert not any(found.problems.values())
    assert found.notes == (
        "'h.0.attn.q_a' stays whole on every rank",
        "'h.0.attn.kv_a' stays whole on every rank",
    )


class Mixed(nn.Module):
    """An MLP whose every output depends on the whole row through a number that has no gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y = y / y.detach().abs().amax(-1, keepdim=True) if self.how == "detached" else y.flip(-1)
        return self.down(y)


@pytest.mark.parametrize("how", ["detached", "flipped"])
def test_flow_that_shards_would_break_is_never_drafted(how: str) -> None:
    found = draft_plan(Text(with_mlp(lambda: Mixed(how))))
    assert (
        not any(".mlp." in name for name in found.plan["tp"])
        and "h.0.mlp.up'" in found.problems["tp"][0]
    )


def test_parameter_of_the_model_itself_is_an_entry_of_the_pipeline() -> None:
    assert list(draft_plan(Text(foreign_gpts.RawPositions())).plan["pp"]) == [
        "tok_emb",
        "pos_emb",
        "blocks",
        "ln_f",
        "head",
    ]


# What cannot be derived


class TiedByHand(foreign_gpts.XTransformer):
    """Logits from the embedding's weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn_layers(self.token_emb(x) + self.pos_emb(x)) @ self.token_emb.weight.t()


@pytest.mark.parametrize(
    ("make", "axis", "words"),
    [
        (
            lambda: with_attention(foreign_gpts.PackedOneKey),
            "tp",
            ["h.0.attn.c_attn'", "several ranks need the same features"],
        ),
        pytest.param(
            lambda: with_attention(foreign_gpts.FixedSlopes),
            "tp",
            ["h.0.attn'", "does not compute a rank's part"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            lambda: with_mlp(foreign_gpts.NormBetween),
            "tp",
            ["h.0.mlp.up'", "several ranks need"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            lambda: GPT(own_gpt.FixedHeads),
            "tp",
            ["'h.0.attn'", "Does it use a constant"],
            marks=pytest.mark.full,
        ),
        (foreign_gpts.with_conv1d, "tp", ["c_attn' (Conv1D)", "Replace them by nn.Linear"]),
        pytest.param(
            TiedByHand,
            "pp",
            ["'token_emb' runs or is read", "both before and after", "Move it into a module"],
        ),
        pytest.param(
            foreign_gpts.LooseLayers,
            "pp",
            ["'token_emb.weight'", "outside of the forward"],
            marks=pytest.mark.full,
        ),
    ],
    ids=[
        "packed_mqa",
        "alibi_buffer",
        "norm_between",
        "constant_heads",
        "conv1d",
        "tied_by_hand",
        "functional_head",
    ],
)
def test_problem_is_named_and_left_out_of_the_plan(make: Make, axis: str, words: list[str]) -> None:
    found = draft(make)
    assert all(word in " ".join(found.problems[axis]) for word in words), found.problems
    assert all(f"# {axis}: {problem}." in as_python(found) for problem in found.problems[axis])
    with pytest.raises(PlanError, match=f"declares no plan for {axis}, and none can be derived"):
        found.require(Layout.parse("tp2_pp2"), ["tp", "pp"], partly=False)
    other = "pp" if axis == "tp" else "tp"
    found.require(Layout.parse(f"{other}2"), [other], partly=False)


def test_heads_that_tp_does_not_divide_are_counted() -> None:
    found = draft(NanoGPT, 8)
    assert (
        "reads 4 groups of features (heads), which tp=8 does not divide; tp=4 works"
        in found.problems["tp"][0]
    )
    assert not any(".attn." in name for name in found.plan["tp"])


@pytest.mark.full
def test_list_of_lists_cannot_be_a_pipeline_but_is_sharded() -> None:
    found = draft(foreign_gpts.LooseLayers)
    assert any("is not called as a module" in problem for problem in found.problems["pp"])
    assert not found.problems["tp"] and "pp" not in found.plan


def test_model_that_does_not_run_asks_for_an_example() -> None:
    class Two(GPT):
        def forward(self, ids: torch.Tensor, config: dict[str, int]) -> torch.Tensor:  # type: ignore[override]
            return super().forward(ids) * config["scale"]

    with pytest.raises(PlanError, match="example_input_array"):
        draft_plan(Text(Two()))
    module = Text(Two())
    module.example_input_array = (torch.zeros(2, 4, dtype=torch.long), {"scale": 2})
    assert "h.*.up" in draft_plan(module).plan["tp"]


def test_model_without_a_list_of_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match="has no list of blocks"):
        draft_plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))


@pytest.mark.parametrize(
    ("plan", "check", "message"),
    [
        ("aut", "auto", 'Did you mean "auto"'),
        (3, "auto", "got a int"),
        ("auto", "never", "needs the self-check"),
    ],
)
def test_wrong_plan_option_is_refused(plan: Any, check: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lightning3DStrategy("tp2", plan=plan, self_check=check)


# Training

DEFAULT = [("nano", "tp2")]
LONG = [
    (name, layout)
    for name in MODELS
    for layout in ("tp2", "pp2", "tp2_pp2")
    if (name, layout) not in DEFAULT
]
LONG += [("loose", "tp2"), ("low_rank", "tp2_pp2"), ("raw_positions", "tp2_pp2")]


TRAINED = MODELS | {
    "raw_positions": foreign_gpts.RawPositions,
    "loose": foreign_gpts.LooseLayers,
    "low_rank": lambda: GPT(Chain),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"), [*DEFAULT, *(pytest.param(*cell, marks=pytest.mark.full) for cell in LONG)]
)
def test_drafted_plan_trains_as_one_process_does(name: str, layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TRAINED[name]()
    fitted = run_ranks(
        own_gpt.fit, Layout.parse(layout).world_size, model, layout, "auto", str(tmp_path)
    )[0]
    assert fitted.losses == pytest.approx(one_process(model), rel=1e-5)
    assert (
        f"self-check of {type(model).__name__}: passed; {Layout.parse(layout).name} reproduces"
        in fitted.printed
    )
    assert f"{type(model).__name__} declares no plan for" in fitted.printed


def refusal(layout: str, plan: Any, cache: str, model: nn.Module) -> str:
    os.environ["XDG_CACHE_HOME"] = cache
    strategy = Lightning3DStrategy(layout, plan=plan, micro_batch_size=2)
    with pytest.raises(PlanError) as refused:
        own_gpt.quiet_trainer(strategy=strategy, devices=2, max_steps=1).fit(
            Text(model), torch.utils.data.DataLoader(own_gpt.rows(), batch_size=4)
        )
    return str(refused.value)


def test_model_without_a_plan_is_refused_with_a_draft_and_auto_with_reasons(tmp_path: Path) -> None:
    for message in run_ranks(refusal, 2, "tp2", None, str(tmp_path), NanoGPT()):
        assert message.startswith("NanoGPT (the 'net' of Text) declares no parallel plan")
        assert as_python(draft(NanoGPT)) in message
        assert message.endswith(
            'Pass it as Lightning3DStrategy("tp2", plan=plan), or pass plan="auto".'
        )
    for message in run_ranks(refusal, 2, "tp2", "auto", str(tmp_path), foreign_gpts.with_conv1d()):
        assert (
            "NanoGPT declares no plan for tp, and none can be derived." in message
            and "(Conv1D)" in message
        )


def test_an_error_about_a_large_model_says_how_to_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft runs one of the blocks and what is around them. For 8 billion parameters it takes a
    minute, and 9 GB."""
    model = NanoGPT()
    whole, block = (
        sum(p.numel() for p in part.parameters()) for part in (model, model.transformer.h[0])
    )
    assert parameters_to_run(Text(model)) == whole - (len(model.transformer.h) - 1) * block
    with torch.device("meta"):
        model.lm_head = nn.Linear(WIDTH, 10**8)
    monkeypatch.setattr(auto, "draft_plan", None)
    mesh: Any = SimpleNamespace(layout=Layout.parse("tp4_pp2"), rank=0)
    message = str(with_draft(NoPlanError("No plan."), Text(model), mesh, None, alone=True))
    assert message.startswith("No plan. A draft of a plan would take minutes here: it runs ")
    assert message.endswith('lightning-3d draft-plan MODULE:NAME --tp 4, or pass plan="auto".')


def test_each_flow_into_a_layer_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a backward through what is around the blocks, with the gradient of a
    vocabulary."""
    followed: list[tuple[int, ...]] = []
    original = DataFlow._sources_of

    def counted(flow: DataFlow, run: Any, tensors: list[Any]) -> Any:
        followed.append(tuple(map(id, tensors)))
        return original(flow, run, tensors)

    monkeypatch.setattr(DataFlow, "_sources_of", counted)
    draft_plan(Text(NanoGPT()))
    assert len(followed) == len(set(followed)) == 5, "four layers and the output"


def test_an_incomplete_draft_names_the_layout_in_which_it_works() -> None:
    pp = {"embed": (["inputs"], ["hidden"]), "h": (["hidden"], ["hidden"])}
    layout = Layout.parse("tp2_pp2_dp2")
    draft = Draft("", "GPT", {"pp": pp}, 2, {"tp": ("cannot be sharded",)}, (), Inputs())
    assert 'Lightning3DStrategy("pp2_dp4", plan="auto")' in where_it_works(draft, layout)
    assert where_it_works(draft, Layout.parse("tp2")) == ""
