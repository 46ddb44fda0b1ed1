"""What a compiled block keeps for its backward: the planner's bytes against those that torch's partitioner chooses."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import parity
import pytest
import sharded
import torch
import yaml
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_3d.layout import Layout
from lightning_3d.planner.architecture import Architecture
from lightning_3d.planner.constants import OURS, compiled
from lightning_3d.planner.job import Job
from lightning_3d.planner.memory import block_activations

CONF = Path(__file__).parents[2] / "conf/model"
SEQ = 128
SMALL = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "num_hidden_layers": 1}
WIDTHS = {
    "llama3_1_8b": {"intermediate_size": 1792},
    "qwen3_8b": {"intermediate_size": 1792},
    "mixtral_8x7b": {"intermediate_size": 1024},
    "qwen3_30b_a3b": {"moe_intermediate_size": 256, "num_experts": 16},
}


def fields(name: str) -> dict[str, Any]:
    return {**yaml.safe_load((CONF / f"{name}.yaml").read_text())["config"], **SMALL, **WIDTHS[name]}


class Saved:
    """Bytes of storages that autograd saves, without those that are known before."""

    def __init__(self, known: Iterator[Tensor]) -> None:
        self._seen = {tensor.untyped_storage()._cdata: tensor for tensor in known}
        self._before = set(self._seen)

    def note(self, tensor: Tensor) -> Tensor:
        self._seen.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for key, tensor in self._seen.items() if key not in self._before)


def saved_by_block(config: dict[str, Any], *, compile: bool) -> int:
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16, attn_implementation="sdpa")
    hidden = torch.zeros(1, SEQ, config["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    angles = model.model.rotary_emb(hidden, torch.arange(SEQ).unsqueeze(0))
    block = model.model.layers[0]
    if compile:  # Inductor's partition of forward and backward, without its kernels
        block.compile(backend="aot_eager_decomp_partition")
    saved = Saved(iter([*model.parameters(), *angles]))
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        block(hidden, attention_mask=None, position_embeddings=angles, position_ids=None)
    return saved.bytes


def predicted(name: str, *, compile: bool, layout: str = "tp1") -> float:
    model = Architecture.from_config(fields(name))
    job = Job(model, Layout.parse(layout), SEQ, 4, 1, stack=compiled(OURS) if compile else OURS)
    return block_activations(job, model.kinds[0])


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if "llama" in name else pytest.mark.full) for name in WIDTHS])
def test_a_compiled_block_keeps_what_the_planner_says(name: str) -> None:
    kept = saved_by_block(fields(name), compile=True)
    assert predicted(name, compile=True) == pytest.approx(kept, rel=0.02)
    assert kept < 0.85 * saved_by_block(fields(name), compile=False), "as an eager one, it would keep more"


def saved_on_a_rank(name: str, compile: bool) -> int:
    """Bytes that the second of three blocks keeps on a tensor-parallel rank that has a part of the sequence."""
    torch._dynamo.reset()
    config = {**fields(name), "num_hidden_layers": 3}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16, attn_implementation="sdpa")
    sharded.cut(model, sequence=True)
    core: Any = model.model
    hidden = torch.zeros(1, SEQ, config["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    angles = core.rotary_emb(hidden, torch.arange(SEQ).unsqueeze(0))
    first, block, _ = core.layers
    if compile:
        block.compile(backend="aot_eager_decomp_partition")
    hidden = first(hidden, attention_mask=None, position_embeddings=angles, position_ids=None)
    saved = Saved(iter([*model.parameters(), *angles]))
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        block(hidden, attention_mask=None, position_embeddings=angles, position_ids=None)
    return saved.bytes


@pytest.mark.parametrize("compile", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_rank_with_a_part_of_the_sequence_keeps_what_the_planner_says(compile: bool) -> None:
    """Compiled blocks keep the whole inputs of their products, eager ones gather them again."""
    name = "llama3_1_8b"
    kept = run_ranks(saved_on_a_rank, 2, name, compile)[0]
    assert predicted(name, compile=compile, layout="tp2") == pytest.approx(kept, rel=0.02)


class Mixture(pl.LightningModule):
    """A bf16 model of three blocks."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.model = config, None

    def configure_model(self) -> None:
        if self.model is None:
            config = AutoConfig.for_model(**self.config)
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        assert self.model is not None
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Count(pl.Callback):
    """Bytes that the second block keeps in a training batch."""

    bytes = 0

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        block = module.model.model.layers[1]
        own = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            saved = Saved(iter([*module.parameters(), *kwargs["position_embeddings"]]))
            with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
                output = own(*args, **kwargs)
            self.bytes = saved.bytes
            return output

        block.forward = forward


def saved_with_sent_tokens(layout: str, compile: bool) -> int:
    """Bytes that a block of Mixtral keeps on a rank that has half of the experts."""
    from lightning_3d.strategy import Lightning3DStrategy

    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    strategy = Lightning3DStrategy(layout, compile=compile, micro_batch_size=1, self_check="never")
    count, rows = Count(), torch.arange(2 * SEQ).view(2, SEQ) % 512
    with patch.object(torch, "compile", backend):
        trainer = parity.quiet_trainer(strategy=strategy, devices=2, precision="bf16-true", max_steps=1, callbacks=[count])
        trainer.fit(Mixture({**fields("mixtral_8x7b"), "num_hidden_layers": 3}), DataLoader(rows, batch_size=1))
    return count.bytes


@pytest.mark.full
@pytest.mark.timeout(300)
def test_experts_of_other_ranks_keep_what_eager_ones_do() -> None:
    """Tokens choose experts as they like, so only what compilation saves is compared, on the same tokens."""
    name, layout = "mixtral_8x7b", "dp2_ep2"
    eager, fused = (run_ranks(saved_with_sent_tokens, 2, layout, compile)[0] for compile in (False, True))
    says = predicted(name, compile=False, layout=layout) - predicted(name, compile=True, layout=layout)
    assert eager - fused == pytest.approx(says, rel=0.02)
