"""Cutting a model in place: names, classes and meta tensors stay; what other stages own is passed
over. One process, no group.
"""

import copy
from typing import Any

import models
import pytest
import torch
from torch import nn

from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.tensor import TensorParallel, rewrite, shard_specs
from lightning_3d.parallel.tensor.experts import PartialSum
from lightning_3d.parallel.tensor.layers import (
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)


def cut(
    model: nn.Module, tp: int, rank: int, plan: dict[str, Any] | None = None, keep: Any = None
) -> dict[str, Any]:
    """Cut for one rank; no group is needed before the first forward."""
    parsed = read_plan(model, plan)
    specs = shard_specs(model, parsed, tp, rank)
    if keep is not None:
        keep(model)
    group: Any = None
    rewrite(model, parsed, specs, TensorParallel(group, tp, rank))
    return specs


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("name", models.MODELS)
def test_names_classes_and_device_stay_and_shapes_are_local(name: str, device: str) -> None:
    plan = models.PlainModel.plan if name == models.PLAIN else None
    with torch.device(device):
        model, whole = models.build(name, 2), models.build(name, 2)
    kinds = {key: type(child) for key, child in model.named_modules()}
    values = {key: parameter.detach() for key, parameter in model.named_parameters()}
    specs = cut(model, 4, 3, plan)
    assert list(model.state_dict()) == list(whole.state_dict())
    assert [key for key, _ in model.named_parameters()] == [
        key for key, _ in whole.named_parameters()
    ]
    assert all(isinstance(child, kinds[key]) for key, child in model.named_modules())
    for key, parameter in model.named_parameters():
        assert parameter.shape == specs[key].local_shape
        assert parameter.device.type == device
        if device == "cpu":
            assert torch.equal(parameter, specs[key].cut(values[key]))


def test_requires_grad_and_marks_on_parameters_stay() -> None:
    model = models.build("llama", 1)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.requires_grad_(False)
    weight.no_decay = True
    cut(model, 2, 0)
    shard = model.model.layers[0].mlp.up_proj.weight
    assert not shard.requires_grad
    assert shard.no_decay
    assert model.model.layers[0].mlp.gate_proj.weight.requires_grad


def test_sizes_are_those_of_the_tensors_that_the_code_around_sees() -> None:
    model = models.build("phi3", 1)
    cut(model, 2, 1)
    attention, config = model.model.layers[0].self_attn, model.config
    assert (attention.config.num_attention_heads, attention.num_key_value_heads) == (2, 1)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert isinstance(attention.o_proj, RowParallelLinear)
    assert attention.o_proj.in_features == 16
    assert isinstance(model.lm_head, VocabParallelHead)
    assert model.lm_head.out_features == 68
    assert isinstance(model.model.embed_tokens, VocabParallelEmbedding)
    assert model.model.embed_tokens.num_embeddings == 68


@pytest.mark.parametrize(("tp", "groups"), [(2, 2), (4, 1)])
def test_key_groups_are_local(tp: int, groups: int) -> None:
    model = models.build("llama", 1)  # 4 heads, 2 key heads
    cut(model, tp, 0)
    assert model.model.layers[0].self_attn.num_key_value_groups == groups


class Shared(nn.Module):
    """Shared experts as Inkling has them: one tensor per matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 4)), nn.Parameter(torch.randn(3, 4, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (torch.relu(tokens @ self.up.transpose(1, 2)) @ self.down.transpose(1, 2)).sum(0)


def test_a_module_whose_own_parameters_are_sharded_is_summed_once() -> None:
    plan = {"tp": {"shared.up": "colwise", "shared.down": "rowwise", "shared": "all_reduce"}}
    whole, tokens = nn.ModuleDict({"shared": Shared()}), torch.randn(5, 4)
    ranks = [copy.deepcopy(whole) for _ in range(2)]
    for rank, model in enumerate(ranks):
        cut(model, 2, rank, plan)
    assert all(
        isinstance(model["shared"], PartialSum) and model["shared"].up.shape == (3, 4, 4)
        for model in ranks
    )
    parts = [Shared.forward(model["shared"], tokens) for model in ranks]
    torch.testing.assert_close(parts[0] + parts[1], whole["shared"](tokens))


def test_a_module_whose_layers_are_summed_is_not_summed_again() -> None:
    mlp = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))})
    cut(mlp, 2, 0, {"tp": {"mlp.0": "colwise", "mlp.1": "rowwise", "mlp": "all_reduce"}})
    assert not isinstance(mlp["mlp"], PartialSum) and isinstance(mlp["mlp"][1], RowParallelLinear)


class Stub(nn.Module):
    """In the place of what another stage owns."""


def test_modules_of_other_stages_are_passed_over() -> None:
    def keep_last_block(model: nn.Module) -> None:
        model.model.layers[0] = Stub()
        model.model.embed_tokens = Stub()

    model = models.build("qwen2", 2)
    specs = cut(model, 2, 1, keep=keep_last_block)
    assert model.lm_head.weight.shape == specs["lm_head.weight"].local_shape
    assert specs["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert model.model.layers[1].mlp.up_proj.weight.shape == (32, 32)
    assert isinstance(model.model.layers[0], Stub)


def test_one_rank_changes_nothing() -> None:
    model = models.build("llama", 1)
    kinds = [type(child) for child in model.modules()]
    specs = cut(model, 1, 0)
    assert [type(child) for child in model.modules()] == kinds
    assert all(spec.tp_replicas == (0,) and not spec.is_cut for spec in specs.values())
