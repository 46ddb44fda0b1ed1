"""One contender of `gpu_single.py` in a process of its own, so that its memory begins empty: trains
a shortened Llama on one device.

    gpu_single_worker.py CONTENDER SETTINGS OUTPUT

SETTINGS is a JSON object, see `Settings`; OUTPUT the file for what was measured, see `measure`. All
contenders do the same work: bf16 parameters; gradients of the micro-batches added up, the global
norm clipped and AdamW stepped in float32, on master weights; the same tokens and, but for
torchtitan's, the same weights.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LEARNING_RATE = 3e-4
CLIP = 1.0
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Settings:
    """What all contenders of a comparison share.

    Attributes:
        config: fields of the Transformers configuration, with the number of layers.
        device: "cuda" or "cpu". sequence: tokens of a row. micro_batch: rows of a micro-batch.
            micro_batches: of an optimizer step.
        warmup: steps before those that count. steps: that count.
    """

    config: Mapping[str, Any]
    device: str
    sequence: int
    micro_batch: int
    micro_batches: int
    warmup: int
    steps: int

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.sequence * self.micro_batch * self.micro_batches


class Watch:
    """Takes the time of every step, from the end of the one before, and the memory of those after
    the warm-up."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._since = time.perf_counter()

    def step_ended(self, loss: float) -> None:
        """The device finishes all its work first."""
        import torch

        if self._settings.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        self.losses.append(loss)
        if self._settings.device == "cuda" and len(self.seconds) == self._settings.warmup:
            torch.cuda.reset_peak_memory_stats()
        self._since = time.perf_counter()

    def result(self) -> dict[str, Any]:
        """`seconds` and `losses` of the steps after the warm-up; `peak`: bytes of tensors at most
        at a time, None on a CPU."""
        import torch

        peak = torch.cuda.max_memory_allocated() if self._settings.device == "cuda" else None
        first = self._settings.warmup
        return {"seconds": self.seconds[first:], "losses": self.losses[first:], "peak": peak}


@contextmanager
def building(device: str) -> Iterator[None]:
    """Models are made on the device, in bf16."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def llama(settings: Settings) -> nn.Module:
    """The model of Transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {key: value for key, value in settings.config.items() if key != "model_type"}
    with building(settings.device):
        return LlamaForCausalLM(LlamaConfig(**fields, use_cache=False, attn_implementation="sdpa"))


def rows(settings: Settings) -> Tensor:
    """Token ids of the whole run, (rows, sequence), in the memory of the host."""
    import torch

    generator = torch.Generator().manual_seed(1)
    count = (settings.warmup + settings.steps) * settings.micro_batches * settings.micro_batch
    return torch.randint(
        settings.config["vocab_size"], (count, settings.sequence), generator=generator
    )


def adamw(parameters: Any, settings: Settings) -> torch.optim.Optimizer:
    """One kernel for all parameters on a GPU."""
    import torch

    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=settings.device == "cuda")


def ours(settings: Settings, **options: Any) -> dict[str, Any]:
    """An ordinary LightningModule under `Lightning3DStrategy` in a plain Trainer.

    Args:
        options: arguments of the strategy.
    """
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_3d.strategy import Lightning3DStrategy

    watch = Watch(settings)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama(settings)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.model(input_ids=batch[0], labels=batch[0]).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.parameters(), settings)

    class Steps(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            watch.step_ended(trainer.strategy.last_step.loss)

    strategy = Lightning3DStrategy(
        "tp1", zero_stage=0, micro_batch_size=settings.micro_batch, **options
    )
    trainer = pl.Trainer(
        accelerator="gpu" if settings.device == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-true",
        max_epochs=1,
        gradient_clip_val=CLIP,
        callbacks=[Steps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = DataLoader(
        TensorDataset(rows(settings)), batch_size=settings.micro_batch * settings.micro_batches
    )
    module = Module()
    module.train()  # Transformers builds for training, but a loaded configuration may say otherwise
    trainer.fit(module, batches)
    return watch.result()


def plain(
    settings: Settings, *, compiled: bool = False, checkpointing: bool = False
) -> dict[str, Any]:
    """The same model in a loop as one writes it.

    Args:
        compiled: `torch.compile` of each block. checkpointing: Transformers' gradient
            checkpointing, of each block.
    """
    model: Any = llama(settings)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if compiled:
        for block in model.model.layers:
            block.compile()
    return loop(model, lambda tokens: model(input_ids=tokens, labels=tokens).loss, settings)


def torchtitan(settings: Settings, *, compiled: bool = False) -> dict[str, Any]:
    """torchtitan's own Llama (0.2), in the same loop; it compiles each block, as its trainer does.

    Raises:
        Unavailable: torchtitan or what it needs is not here, or another version.
    """
    import torch

    try:
        from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    except ImportError as error:
        raise Unavailable(f"torchtitan 0.2 cannot be imported ({error})") from error

    config = settings.config
    wanted, default = config["intermediate_size"], int(8 * config["hidden_size"] / 3)
    arguments = TransformerModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        multiple_of=wanted,  # it rounds the width of the MLP up to this
        ffn_dim_multiplier=0.9 * wanted / default,
        norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        max_seq_len=settings.sequence,
    )
    with building(settings.device):
        model = Transformer(arguments)
        with torch.no_grad():
            model.init_weights()
    if compiled:
        for block in model.layers.values():
            block.compile(fullgraph=True)

    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens)[:, :-1].flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())

    return loop(model, loss, settings)


def loop(
    model: nn.Module, loss_of: Callable[[Tensor], Tensor], settings: Settings
) -> dict[str, Any]:
    """bf16 parameters, float32 master weights: the gradients of each micro-batch are added to those
    of the masters."""
    import torch

    parameters = list(model.parameters())
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = adamw(masters, settings)
    watch = Watch(settings)
    for step in rows(settings).split(settings.micro_batch * settings.micro_batches):
        total = torch.zeros((), device=settings.device)
        for tokens in step.split(settings.micro_batch):
            loss = loss_of(tokens.to(settings.device)) / settings.micro_batches
            loss.backward()
            total += loss.detach()
            add_gradients(parameters, masters)
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        watch.step_ended(total.item())
    return watch.result()


def add_gradients(parameters: list[nn.Parameter], masters: list[torch.nn.Parameter]) -> None:
    """Move what a backward left to the float32 sums."""
    for parameter, master in zip(parameters, masters, strict=True):
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None


class Unavailable(Exception):
    """This contender cannot run here; the message says why."""


CONTENDERS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "plain": plain,
    "plain compile": partial(plain, compiled=True),
    "plain checkpointing": partial(plain, checkpointing=True),
    "plain compile checkpointing": partial(plain, compiled=True, checkpointing=True),
    "torchtitan": torchtitan,
    "torchtitan compile": partial(torchtitan, compiled=True),
    "ours": ours,
    "ours compile": partial(ours, compile=True),
    "ours compile chunks": partial(ours, compile=True, loss_chunks="auto"),
    "ours selective": partial(ours, recompute="selective"),
    "ours selective mm": partial(ours, recompute="selective", recompute_keep=["mm"]),
    "ours full": partial(ours, recompute="full"),
    "ours full every 2nd": partial(ours, recompute="full", recompute_every=2),
    "ours offload": partial(ours, offload_activations=True),
    "ours compile offload": partial(ours, compile=True, offload_activations=True),
    "ours compile selective": partial(ours, compile=True, recompute="selective"),
    "ours compile full": partial(ours, compile=True, recompute="full"),
    "ours fp8": partial(ours, fp8=True),
    "ours fp8 compile": partial(ours, fp8=True, compile=True),
}


def measure(contender: str, settings: Settings) -> dict[str, Any]:
    """`Watch.result`, or {"failed": reason} where the contender cannot run or does not fit."""
    import torch

    from lightning_3d.errors import Lightning3DError

    try:
        return CONTENDERS[contender](settings)
    except torch.OutOfMemoryError:
        return {"failed": OUT_OF_MEMORY}
    except (Unavailable, Lightning3DError) as error:
        return {"failed": str(error)}


def describe_device() -> dict[str, Any]:
    """The GPU that a worker would run on, or {"missing": why there is none}."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "finds no NVIDIA GPU that it can use" if built else "is built without CUDA"
        return {"missing": f"torch {torch.__version__} {why}"}
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}


def main() -> None:
    contender, settings, output = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    answer = (
        describe_device()
        if contender == "device"
        else measure(contender, Settings(**json.loads(settings)))
    )
    Path(output).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
