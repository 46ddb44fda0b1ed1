"""One rank of one contender: trains the same Llama on the same tokens, step by step.

Started by `measure.Contender` with the environment of torchrun and two pipes:

    peers_worker.py CONTENDER LAYOUT --steps 12 --go 3 --done 4

All contenders do the same work: float32, AdamW, clipping of the global gradient norm (except
picotron), micro-batches of `MICRO_BATCH` rows out of a global batch of `GLOBAL_BATCH`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers_picotron import picotron

if TYPE_CHECKING:
    from torch import Tensor, nn

LLAMA: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "use_cache": False,
    "attn_implementation": "sdpa",
}
SEQUENCE = 256
GLOBAL_BATCH = 32
MICRO_BATCH = 2
MESSAGES = "LIGHTNING_3D_BENCHMARK_MESSAGES"
"""Environment variable: the file that `note_messages` writes."""
AGREEMENT = 4096
"""Bytes of the largest message that is not noted: no bucket is as small."""
LEARNING_RATE = 3e-4
CLIP = 1.0
SMALL_BUCKET = 4 * 2**20
"""Bytes: a seventh of this model's gradients, as 32 MiB are of those of a model with 60 million
parameters on a rank."""


class Turns:
    """Tells that a step is done and waits to be told to take the next.

    Args:
        go, done: pipes to read from and to write to; None to go on at once.
    """

    def __init__(self, go: int | None = None, done: int | None = None) -> None:
        self._go, self._done = go, done

    def step_ended(self) -> None:
        if self._go is not None and self._done is not None:
            os.write(self._done, b".")
            os.read(self._go, 1)


def llama() -> nn.Module:
    """The model that all contenders train, in memory."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config())


def llama_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**LLAMA)


def all_rows(steps: int) -> Tensor:
    """Token ids of the whole run, (steps * global batch, sequence): the rows of step s follow those
    of step s - 1."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(LLAMA["vocab_size"], (steps * GLOBAL_BATCH, SEQUENCE), generator=generator)


def micro_batches(steps: int, dp_rank: int = 0, dp: int = 1) -> Iterator[Tensor]:
    """This data rank's micro-batches in order, (micro-batch, sequence)."""
    for step in all_rows(steps).split(GLOBAL_BATCH):
        yield from step[dp_rank::dp].split(MICRO_BATCH)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def plain(layout: str, steps: int, turns: Turns) -> None:
    """A loop as one writes it: one process, gradients accumulated over the micro-batches."""
    import torch

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = micro_batches(steps)
    accumulated = GLOBAL_BATCH // MICRO_BATCH
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(accumulated):
            rows = next(batches)
            loss = model(input_ids=rows, labels=rows).loss / accumulated
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        turns.step_ended()


def ours(
    layout: str,
    steps: int,
    turns: Turns,
    zero_stage: int = 1,
    overlap: bool = True,
    trace: int | None = None,
    bucket_bytes: int | None = None,
    sequence_parallel: bool | None = None,
    muon: bool = False,
    **more: Any,
) -> None:
    """An ordinary LightningModule under `Lightning3DStrategy` in a plain Trainer.

    Args:
        overlap: False: gradients are reduced after the last backward of a step, never before.
        trace: steps from one that is traced to the next.
        bucket_bytes: of the reduction of gradients; by default 32 MiB, in which this model's
            gradients fit.
        muon: Muon trains the matrices of the blocks, and AdamW the rest.
        more: further options of the strategy.
    """
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_3d.layout import Layout
    from lightning_3d.parallel.zero import DataParallelBackend, make_backend
    from lightning_3d.parallel.zero.muon import MuonWithAdamW
    from lightning_3d.strategy import Lightning3DStrategy

    if not overlap:
        scope = DataParallelBackend.gradient_scope
        DataParallelBackend.gradient_scope = lambda self, **given: scope(
            self, **given | {"overlap": False}
        )  # type: ignore[method-assign]
    if bucket_bytes is not None:
        make_backend.__kwdefaults__["bucket_bytes"] = bucket_bytes
    if MESSAGES in os.environ:
        note_messages(os.environ[MESSAGES])

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = llama()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.model(input_ids=batch[0], labels=batch[0]).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if not muon:
                return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
            matrices = [
                parameter
                for name, parameter in self.named_parameters()
                if ".layers." in name and parameter.ndim == 2
            ]
            chosen = {id(parameter) for parameter in matrices}
            others = [parameter for parameter in self.parameters() if id(parameter) not in chosen]
            return MuonWithAdamW(
                [{"params": matrices, "algorithm": "muon"}, {"params": others}], lr=LEARNING_RATE
            )

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            turns.step_ended()

    degrees = Layout.parse(layout)
    rows = DataLoader(TensorDataset(all_rows(steps)), batch_size=GLOBAL_BATCH // degrees.dp)
    strategy = Lightning3DStrategy(
        layout,
        micro_batch_size=MICRO_BATCH,
        zero_stage=zero_stage,
        trace_every_n_steps=trace,
        sequence_parallel=sequence_parallel,
        **more,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=degrees.world_size,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=CLIP,
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), rows)


def note_messages(file: str) -> None:
    """Let rank 0 write into a file, for the latest step: when each bucket was sent and had arrived,
    its bytes and its ranks, and when the last backward was over."""
    import torch.distributed as dist

    from lightning_3d.parallel.zero import DataParallelBackend
    from lightning_3d.tracing import messages
    from lightning_3d.tracing.marks import Marks

    log, over = messages.MessageLog(Marks()), [0.0]
    messages.follow(log)
    messages.follow = lambda log: None  # no trace of a step begins or ends in this process
    reduce, after_backward = DataParallelBackend.reduce, DataParallelBackend.after_backward

    def backward_is_over(self: DataParallelBackend, *args: Any, **given: Any) -> None:
        over[0] = time.perf_counter()  # before what is sent now; that of the last backward stays
        after_backward(self, *args, **given)

    def reduce_all(self: DataParallelBackend, scale: Any) -> None:
        reduce(self, scale)
        reduced = time.perf_counter()
        found = [
            (one.start, one.end, one.size, one.ranks)
            for one in log.take()
            if "reduce" in one.operation and one.size > AGREEMENT
        ]
        if dist.get_rank() == 0:
            Path(file).write_text(
                json.dumps({"backward_over": over[0], "reduced": reduced, "messages": found})
            )

    DataParallelBackend.reduce = reduce_all  # type: ignore[method-assign]
    DataParallelBackend.after_backward = backward_is_over  # type: ignore[method-assign]


def deepspeed_pipeline(layout: str, steps: int, turns: Turns) -> None:
    """DeepSpeed's own PipelineEngine with ZeRO-1, over Transformers' decoder layers."""
    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule

    from lightning_3d.layout import Layout

    # Otherwise its first use compiles shared-memory collectives, for half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    degrees = Layout.parse(layout)
    torch.manual_seed(0)
    layers = [LayerSpec(kind, *arguments) for kind, arguments in sequential_llama()]
    model = PipelineModule(layers, num_stages=degrees.pp, loss_fn=next_token_loss)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE
        ),
        config={
            "train_batch_size": GLOBAL_BATCH,
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )
    batches = (
        (rows, rows)
        for rows in micro_batches(steps, engine.grid.get_data_parallel_rank(), degrees.dp)
    )
    for _ in range(steps):
        engine.train_batch(batches)
        turns.step_ended()


def sequential_llama() -> list[tuple[type[nn.Module], tuple[Any, ...]]]:
    """The same Llama as a chain of modules (class, arguments), each fed the output of the one
    before, for DeepSpeed."""
    import torch
    from torch import nn
    from transformers.models.llama.modeling_llama import (
        LlamaDecoderLayer,
        LlamaRMSNorm,
        LlamaRotaryEmbedding,
    )

    class Embedding(nn.Embedding):
        def __init__(self, config: Any) -> None:
            super().__init__(config.vocab_size, config.hidden_size)
            nn.init.normal_(self.weight, std=config.initializer_range)

    class Block(LlamaDecoderLayer):
        def __init__(self, config: Any, index: int) -> None:
            super().__init__(config, index)
            for layer in self.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=config.initializer_range)
            positions = torch.arange(SEQUENCE)[None]
            rotary: nn.Module = LlamaRotaryEmbedding(config)
            self.rotation = rotary(torch.zeros(1), positions)  # computed once: a gift to the peer

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden, position_embeddings=self.rotation)

    class Head(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.linear = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            nn.init.normal_(self.linear.weight, std=config.initializer_range)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.linear(self.norm(hidden))

    config = llama_config()
    config._attn_implementation = LLAMA["attn_implementation"]
    blocks = [(Block, (config, index)) for index in range(config.num_hidden_layers)]
    return [(Embedding, (config,)), *blocks, (Head, (config,))]


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss that LlamaForCausalLM computes."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, labels, vocab_size=LLAMA["vocab_size"])


def transformers_tp_fsdp(layout: str, steps: int, turns: Turns) -> None:
    """Transformers' own tensor parallelism with FSDP2, in the loop that its Trainer runs (which
    refuses CPUs)."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from lightning_3d.layout import Layout

    degrees = Layout.parse(layout)
    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(folder)  # it shards models that it loads, not ones that it builds
        distributed = DistributedConfig(tp_size=degrees.tp, fsdp_size=degrees.dp)
        model: Any = LlamaForCausalLM.from_pretrained(
            folder, distributed_config=distributed, attn_implementation=LLAMA["attn_implementation"]
        )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    accumulated = GLOBAL_BATCH // MICRO_BATCH // degrees.dp
    batches = micro_batches(steps, torch.distributed.get_rank() // degrees.tp, degrees.dp)
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for index in range(accumulated):
            model.set_requires_gradient_sync(index == accumulated - 1)
            rows = next(batches)
            loss = model(input_ids=rows, labels=rows).loss / accumulated
            loss.backward()
            total += loss.item()
        clip_over_meshes(model, CLIP)
        optimizer.step()
        turns.step_ended()


def clip_over_meshes(model: nn.Module, max_norm: float) -> None:
    """Clip by the global norm of gradients that are DTensors on different meshes, which
    `clip_grad_norm_` refuses."""
    import torch
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms: list[Any] = [
        get_total_norm([p.grad for p in group if p.grad is not None]) for group in by_mesh.values()
    ]
    total = torch.linalg.vector_norm(
        torch.stack([n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms])
    )
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)


CONTENDERS: dict[str, Callable[[str, int, Turns], None]] = {
    "plain": plain,
    "ours": ours,
    "ours_zero0": partial(ours, zero_stage=0),
    "ours_waiting": partial(ours, overlap=False),
    "ours_small_buckets": partial(ours, bucket_bytes=SMALL_BUCKET, zero_stage=0),
    "ours_small_buckets_waiting": partial(
        ours, bucket_bytes=SMALL_BUCKET, zero_stage=0, overlap=False
    ),
    "ours_replicas": partial(
        ours, bucket_bytes=SMALL_BUCKET, zero_reduce_scatter=True, zero_shard_size=2
    ),
    "ours_replicas_waiting": partial(
        ours, bucket_bytes=SMALL_BUCKET, zero_reduce_scatter=True, zero_shard_size=2, overlap=False
    ),
    "ours_traced": partial(ours, trace=1),
    "deepspeed_pipeline": deepspeed_pipeline,
    "transformers_tp_fsdp": transformers_tp_fsdp,
    "picotron": picotron,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("layout")
    parser.add_argument("--steps", type=int, required=True, help="steps to take")
    parser.add_argument("--go", type=int, help="pipe to wait at after each step")
    parser.add_argument("--done", type=int, help="pipe to tell the end of each step")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    CONTENDERS[options.contender](options.layout, options.steps, Turns(options.go, options.done))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
