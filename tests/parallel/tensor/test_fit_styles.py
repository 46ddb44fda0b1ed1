"""What a plan says of experts and MLPs is tried on them: on meta, in one process."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.compat.torch_fake import fake_mode
from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import Cut, ParallelPlan, read_plan
from lightning_3d.parallel.expert.experts import expert_specs
from lightning_3d.parallel.tensor import cuts_here, fit_styles, resolve, resolve_plan, style_trials
from lightning_3d.parallel.trials import ask

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from family_configs import build
from versions import since_transformers

HIDDEN, INNER, EXPERTS = 12, 8, 3


class Halves(nn.Module):
    """Experts whose gate and up are the halves of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))

    def split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = both.chunk(2, dim=-1)
        return gate, up

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = []
        for token, experts, shares in zip(hidden, index, weights, strict=True):
            row = torch.zeros_like(token)
            for expert, share in zip(experts, shares, strict=True):
                gate, up = self.split(F.linear(token, self.gate_up_proj[expert]))
                row = row + share * F.linear(F.silu(gate) * up, self.down_proj[expert])
            rows.append(row)
        return torch.stack(rows)


class Interleaved(Halves):
    def split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        return both[..., ::2], both[..., 1::2]


class Normed(Halves):
    """Nothing adds up: each part would be divided by its own norm."""

    def split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = both.chunk(2, dim=-1)
        return gate / gate.norm(), up


class Alone(Halves):
    """Cannot be run on random tokens."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        raise RuntimeError("needs a kernel of its own")


def expert_plan(style: str) -> ParallelPlan:
    return ParallelPlan(
        {
            "experts": Cut("moe_tp_experts"),
            "experts.gate_up_proj": Cut(style),
            "experts.down_proj": Cut("rowwise"),
        },
        experts=("experts",),
    )


@pytest.mark.parametrize("declared", ["colwise", "packed_colwise"])
@pytest.mark.parametrize(
    ("kind", "right"), [(Halves, "packed_colwise"), (Interleaved, "colwise"), (Alone, None)]
)
def test_fused_experts_are_cut_as_their_forward_reads_them(
    kind: type[nn.Module], right: str | None, declared: str
) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"experts": kind()})
    fitted = fit_styles(model, expert_plan(declared), 2)
    assert fitted.tp["experts.gate_up_proj"].style == (right or declared)
    assert fitted.tp["experts.down_proj"].style == "rowwise"


def test_large_experts_are_tried_at_small_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        experts = Halves()
        experts.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * 16384, 8192))
        experts.down_proj = nn.Parameter(torch.empty(EXPERTS, 8192, 16384))
        model = nn.ModuleDict({"experts": experts})
    made: list[int] = []
    draw = style_trials.draw
    monkeypatch.setattr(
        style_trials, "draw", lambda name, shape: made.append(math.prod(shape)) or draw(name, shape)
    )
    assert (
        fit_styles(model, expert_plan("colwise"), 8).tp["experts.gate_up_proj"].style
        == "packed_colwise"
    )
    assert 0 < max(made) < 2**16
    made.clear()
    fit_styles(model, expert_plan("colwise"), 8)
    assert not made


def test_experts_that_no_style_cuts_are_refused() -> None:
    with pytest.raises(PlanError, match="do not add up to the whole output"):
        fit_styles(nn.ModuleDict({"experts": Normed()}), expert_plan("packed_colwise"), 2)


class Mlp(nn.Module):
    """Packed and with biases, so that a bias that is added on both ranks would show."""

    def __init__(self, looks_at_rows: bool = False) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)
        self.looks_at_rows = looks_at_rows

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        if self.looks_at_rows:
            gate = gate - gate.mean(-1, keepdim=True)
        return self.down(F.silu(gate) * up)


def mlp_plan() -> ParallelPlan:
    return ParallelPlan({"*.mlp.gate_up": Cut("colwise"), "*.mlp.down": Cut("rowwise")})


def styles_of(model: nn.Module, plan: ParallelPlan, tp: int) -> dict[str, str]:
    return {
        name: cut.style for name, cut in resolve(model, fit_styles(model, plan, tp), tp).items()
    }


@pytest.mark.parametrize("tp", [2, 4])
def test_an_mlp_is_cut_as_its_forward_reads_it_layer_by_layer(tp: int) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                str(index): nn.ModuleDict({"mlp": Mlp(looks_at_rows=index == 1)})
                for index in range(2)
            }
        )
    assert styles_of(model, mlp_plan(), tp) == {
        "0.mlp.gate_up": "packed_colwise",
        "0.mlp.down": "rowwise",
        "1.mlp.gate_up": "colwise_gather_output",
        "1.mlp.down": "rowwise_split_input",
    }


def test_adapters_change_nothing() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = nn.ModuleDict({"0": nn.ModuleDict({"mlp": Mlp(looks_at_rows=True)})})
    inject_adapter_in_model(LoraConfig(target_modules=["gate_up"]), model)
    assert styles_of(model, mlp_plan(), 2) == {
        "0.mlp.gate_up": "colwise_gather_output",
        "0.mlp.down": "rowwise_split_input",
    }


def test_a_style_with_parts_is_the_users_word() -> None:
    model = nn.ModuleDict({"0": nn.ModuleDict({"mlp": Mlp()})})
    plan = ParallelPlan(
        {"*.mlp.gate_up": Cut("packed_colwise", parts=(INNER, INNER)), "*.mlp.down": Cut("rowwise")}
    )
    assert fit_styles(model, plan, 2) == plan


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("mixtral", {}),
        ("longcat_flash", {}),
        pytest.param(
            "inkling2_text",
            {
                f"model.layers.{index}.mlp.experts.gate_up_proj": "packed_colwise"
                for index in range(4)
            },
            marks=since_transformers("5.23"),
        ),
    ],
)
def test_families(family: str, changed: dict[str, str]) -> None:
    with torch.device("meta"):
        model = build(family)
    plan = read_plan(model)
    fitted = fit_styles(model, plan, 2)
    assert {name: cut.style for name, cut in fitted.tp.items() if name not in plan.tp} == changed


def test_an_entry_for_a_module_without_parameters_is_not_passed_over() -> None:
    model: Any = nn.ModuleDict(
        {"up": nn.Identity(), "norm": nn.Identity(), "down": nn.Linear(4, 4)}
    )
    plan = ParallelPlan({"up": Cut("colwise"), "down": Cut("rowwise")})
    with pytest.raises(PlanError, match="is for nn.Linear, but it is a Identity"):
        resolve(model, plan, 2)
    assert set(resolve(model, plan, 2, whole=False)) == {"down"}
    harmless = ParallelPlan({"norm": Cut("replicated_with_grad_allreduce"), "down": Cut("rowwise")})
    assert set(resolve(model, harmless, 2)) == {"down"}


def test_a_plan_is_resolved_once_also_for_a_part_of_a_model_and_by_each_name_of_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = Mlp()
    model: Any = nn.ModuleDict(
        {str(index): nn.ModuleDict({"mlp": shared if index != 1 else Mlp()}) for index in range(3)}
    )
    plan = fit_styles(model, mlp_plan(), 2)
    model["0"], model["1"] = nn.Identity(), nn.ModuleDict({"mlp": Mlp()})
    monkeypatch.setattr(resolve_plan, "resolve", None)
    styles = {name: cut.style for name, cut in cuts_here(model, plan, 2, whole=False).items()}
    layers = {"gate_up": "packed_colwise", "down": "rowwise"}
    assert styles == {
        f"{index}.mlp.{layer}": style for index in (1, 2) for layer, style in layers.items()
    }


def test_experts_without_weights_are_not_sent_tokens() -> None:
    with torch.device("meta"):
        model = build("longcat_flash")
    plan = read_plan(
        model, {"ep": {"model.layers.*.mlp.experts": "ep_dispatch_experts"}}
    ).for_experts(2, model)
    with pytest.raises(PlanError, match="without weights"):
        expert_specs(model, plan, 2, 0, 0)


@pytest.mark.parametrize("shape", [(), (6,), (3, 6)])
def test_what_all_experts_share_is_not_split(shape: tuple[int, ...]) -> None:
    """A vector of 6 elements has two for each of 3 experts, but is no row of a matrix."""
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.num_experts = 3
    model.experts.scale = nn.Parameter(torch.zeros(shape))
    plan = ParallelPlan({"experts.scale": Cut("grouped_gemm")}, experts=("experts",))
    if shape == (3, 6):
        assert expert_specs(model, plan, 3, 0, 0)["experts.scale"].local_shape == (1, 6)
        return
    with pytest.raises(
        PlanError,
        match=(
            r"ep cannot split 'experts.scale' of shape .*: it does not have as many rows for each"
            r" of the 3"
        ),
    ):
        expert_specs(model, plan, 3, 0, 0)


def test_a_dry_run_tries_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "_answers", {})
    with fake_mode(), torch.device("meta"):
        model = nn.ModuleDict({"0": nn.ModuleDict({"mlp": Mlp()})})
        assert styles_of(model, mlp_plan(), 2)["0.mlp.gate_up"] == "packed_colwise"
