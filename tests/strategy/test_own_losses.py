"""Losses that a model computes in its own forward: their targets are counted."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from lightning_3d.engine.step.loss_weights import LossWeights, weigh_loss
from lightning_3d.parallel.specialize import specialize

SIZES = {
    "vocab_size": 11,
    "d_model": 8,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 8,
}
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
LABELS = torch.tensor([[1, 2, 3, -100], [5, -100, -100, -100]])


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return BartForCausalLM(
        BartConfig(**SIZES, dropout=0.0, is_decoder=True, is_encoder_decoder=False)
    )


def small_llama() -> Any:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes))


def weight_of(weights: LossWeights) -> float:
    return float(weights.weight(2, torch.device("cpu")))


def test_targets_are_counted_once_however_often_the_model_is_fitted(model: Any) -> None:
    expected = model(IDS, labels=LABELS).loss
    for _ in range(2):
        weights = LossWeights()
        weigh_loss(nn.ModuleList([model]), weights)
        weights.begin()
        assert torch.allclose(model(IDS, labels=LABELS).loss, expected)
        assert weight_of(weights) == 4


def test_a_mean_over_no_targets_is_zero(model: Any) -> None:
    weights = LossWeights()
    weigh_loss(nn.ModuleList([model]), weights)
    loss = model(IDS, labels=torch.full_like(LABELS, -100)).loss
    loss.backward()
    assert loss.item() == 0 and weight_of(weights) == 0
    assert all(
        parameter.grad is None or not parameter.grad.any() for parameter in model.parameters()
    )


def test_a_loss_of_the_users_own_weighs_rows(model: Any) -> None:
    weights = LossWeights()
    weigh_loss(nn.ModuleList([model]), weights)
    F.cross_entropy(model(IDS).logits.flatten(0, 1), LABELS.flatten())
    assert weight_of(weights) == 2


def test_a_step_that_ends_inside_the_model_counts_nothing_afterwards(model: Any) -> None:
    class Boundary(BaseException):
        pass

    def end(*args: Any) -> None:
        raise Boundary

    weights = LossWeights()
    weigh_loss(nn.ModuleList([model]), weights)
    handle = model.lm_head.register_forward_pre_hook(end)
    with pytest.raises(Boundary):
        model(IDS, labels=LABELS)
    handle.remove()
    F.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]))
    assert weight_of(weights) == 2


def test_a_loss_function_counts_alone() -> None:
    model = small_llama()
    weights = LossWeights()
    weigh_loss(nn.ModuleList([model]), weights)
    loss: Tensor = model(IDS, labels=LABELS).loss
    assert loss.isfinite() and weight_of(weights) == 2  # the first token of a row is not predicted
    assert "forward" not in vars(model)


def test_masked_tokens_are_counted() -> None:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model: Any = BertForMaskedLM(BertConfig(vocab_size=11, **sizes)).eval()
    expected = model(IDS, labels=LABELS).loss
    weights = LossWeights()
    weigh_loss(nn.ModuleList([model]), weights)
    assert torch.allclose(model(IDS, labels=LABELS).loss, expected) and weight_of(weights) == 4


class InFront(nn.Module):
    """Stands for what the strategy puts in front of a class, such as sequence parallelism."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


InFront.forward.__module__ = "lightning_3d.parallel.somewhere"


def test_a_model_with_a_class_of_the_strategy_in_front_is_counted(model: Any) -> None:
    specialize(model, InFront)
    weights = LossWeights()
    weigh_loss(nn.ModuleList([model]), weights)
    assert model(IDS, labels=LABELS).loss.isfinite() and weight_of(weights) == 4


def test_a_class_of_the_strategy_in_front_of_a_model_that_counts_changes_nothing() -> None:
    """No mode is active during its forward, which would break the graphs of compiled blocks."""
    model = small_llama()
    specialize(model, InFront)
    weigh_loss(nn.ModuleList([model]), LossWeights())
    assert "forward" not in vars(model)


def test_a_loss_function_of_the_users_own_weighs_rows() -> None:
    model = small_llama()
    model.loss_function = lambda logits, labels, *args, **kwargs: F.cross_entropy(
        logits.flatten(0, 1), labels.flatten()
    )
    weights = LossWeights()
    weigh_loss(nn.ModuleList([model]), weights)
    assert (
        model(IDS, labels=LABELS).loss.isfinite()
        and weight_of(weights) == 2
        and "forward" not in vars(model)
    )
