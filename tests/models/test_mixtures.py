"""Mixtures of experts, found in models of Transformers and of users."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.models.mixtures import draft_ep, find_mixtures
from lightning_3d.models.parallel_plan import find_pipeline_module

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from family_configs import NO_REFERENCE, build, families, has_experts


def model(family: str) -> nn.Module:
    with torch.device("meta"):
        return build(family)


def test_experts_whose_rows_are_one_after_another() -> None:
    experts = "transformer.blocks.*.ffn.experts"
    matrices = {f"{experts}.mlp.{name}": "grouped_gemm" for name in ("w1", "v1", "w2")}
    assert draft_ep(model("dbrx")) == {experts: "ep_dispatch_experts", **matrices}


@pytest.mark.parametrize(
    ("family", "kind"), [("jetmoe", "JetMoeParallelExperts"), ("llama4_text", "Llama4TextExperts")]
)
def test_experts_that_are_called_with_something_else(family: str, kind: str) -> None:
    with pytest.raises(
        PlanError, match=rf"{kind}\) is not called with tokens, the experts of each token"
    ):
        draft_ep(model(family))


def test_a_plan_for_experts_alone_is_a_plan() -> None:
    """ZAYA declares no other."""
    assert find_pipeline_module(nn.ModuleDict({"model": model("zaya")}))[0] == "model"


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.experts = 2, nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


def test_a_list_of_experts() -> None:
    assert list(find_mixtures(nn.Sequential(nn.Linear(4, 4), Listed()))) == ["1.experts"]
    named = Listed()
    # Switch Transformers
    named.experts = nn.ModuleDict({"expert_0": nn.Linear(4, 4), "expert_1": nn.Linear(4, 4)})
    assert list(find_mixtures(named)) == ["experts"]
    with pytest.raises(PlanError, match="Sequential is dense: it has no experts"):
        draft_ep(nn.Sequential(nn.Linear(4, 4)))


def test_experts_for_each_token_are_no_number_of_experts() -> None:
    """A tensor with as many rows as a token has experts, such as filters, is not a mixture."""
    filters = nn.Conv1d(4, 2, 3)
    filters.num_experts_per_tok = 2
    assert not find_mixtures(nn.Sequential(nn.Linear(4, 4), filters))


@pytest.mark.parametrize(
    "family", ["gpt2", "reformer", "xlnet", "zamba", "gemma3", "recurrent_gemma"]
)
def test_matrices_of_heads_are_not_experts(family: str) -> None:
    assert not has_experts(family)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_families_with_a_router_have_experts() -> None:
    """Names of classes are the other witness."""
    for family in set(families()) - NO_REFERENCE.keys():
        named = any(
            type(child).__name__.endswith(("Experts", "Router"))
            for child in model(family).modules()
        )
        assert has_experts(family) == named, family
