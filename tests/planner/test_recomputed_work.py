"""What `recompute=selective` computes again: the planner's operations and bytes against those of a
backward of Transformers' blocks."""

from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from moved_bytes import MovedBytes
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.block_costs import work_of
from lightning_3d.app.planner.constants import OURS
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Efficiency, Machine
from lightning_3d.layout import Layout
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.parallel.blocks.wrap import process_blocks

SEQ = 128
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def backward(recompute: str, kernel: str) -> tuple[int, Counter[str]]:
    """(operations of products, bytes by operator) of the backward pass of a block."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**CONFIG), dtype=torch.bfloat16, attn_implementation=kernel
    )
    hidden = torch.randn(1, SEQ, 256, dtype=torch.bfloat16, requires_grad=True)
    angles = model.model.rotary_emb(hidden, torch.arange(SEQ).unsqueeze(0))
    process_blocks(list(model.model.layers), BlockOptions(recompute=recompute))
    mask = (
        torch.full((SEQ, SEQ), -inf, dtype=torch.bfloat16).triu(1)[None, None]
        if kernel == "eager"
        else None
    )
    output = model.model.layers[0](
        hidden, attention_mask=mask, position_embeddings=angles, position_ids=None
    )
    with FlopCounterMode(display=False) as products, MovedBytes(least=1024) as counted:
        output.sum().backward()
    return products.get_total_flops(), counted.moved


def predicted(machine: Machine, kernel: str) -> float:
    """Seconds that recomputation adds to a block."""
    job = Job(
        Architecture.from_config(CONFIG),
        Layout(),
        SEQ,
        1,
        1,
        stack=replace(OURS, flash=kernel != "eager"),
    )
    again, once = (
        work_of(replace(job, recompute=word), machine).blocks[0].backward
        for word in ("selective", "none")
    )
    return again - once


def machine(*, operations: float, bandwidth: float) -> Machine:
    rates = 1.0, bandwidth, operations, operations, operations, inf, inf
    return Machine("", 1, 1, *rates, 0.0, 0.0, Efficiency(matmul=1.0, attention=1.0, memory=1.0))


def test_only_scores_and_values_are_multiplied_again() -> None:
    again = backward("selective", "eager")[0] - backward("none", "eager")[0]
    assert predicted(machine(operations=1.0, bandwidth=inf), "eager") == pytest.approx(again)


def test_element_wise_operations_stream_again() -> None:
    """Norms, rotation and the activation of the MLP, but neither products nor fused attention."""
    none, selective = backward("none", "sdpa"), backward("selective", "sdpa")
    again = selective[1] - none[1]
    assert selective[0] == none[0]
    assert not any("attention" in name or name in ("mm", "addmm", "bmm") for name in again), again
    assert {"mul", "add", "neg", "cat", "silu", "pow"} <= set(again), again
    assert predicted(machine(operations=inf, bandwidth=1.0), "sdpa") == pytest.approx(
        sum(again.values()), rel=0.25
    )
