"""Checkpoints as others write them, made by the real thing: Lightning's DDP and FSDP strategies,
DeepSpeed's engine.

Each function runs on every rank, trains `STEPS` steps, saves, goes on for `MORE`, and returns the
losses of the latter.
"""

import contextlib
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from checkpoint_fits import GLOBAL_BATCH, TiedModel
from lightning.pytorch.accelerators import CUDAAccelerator
from parity import quiet_trainer
from plain_module import RepeatingText, TextData
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

STEPS, MORE = 6, 5
"""The checkpoint is from the middle of the second epoch of four steps."""
STEPS_DEEPSPEED = 8
"""Its engine knows of no epochs: from the end of one."""


class SaveAt(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == STEPS:
            trainer.save_checkpoint(self.path)


class MeanLosses(pl.Callback):
    """The mean over the ranks of each step's loss."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        mean = outputs["loss"].detach().clone()
        dist.all_reduce(mean)
        self.losses.append(float(mean) / dist.get_world_size())


class DealtText(TextData):
    """The rows in their order, dealt to ranks: the sampler that Lightning would add shuffles."""

    def train_dataloader(self) -> DataLoader:
        rows = RepeatingText(self.train_rows, seed=1)
        return DataLoader(
            rows, batch_size=self.batch_size, sampler=DistributedSampler(rows, shuffle=False)
        )


def fsdp_on_cpu() -> Any:
    """A context in which torch's FSDP runs on CPUs: it does if it is told so by an argument, which
    Lightning leaves to CUDA."""
    make = FullyShardedDataParallel.__init__

    def make_on_cpu(self: Any, *args: Any, **more: Any) -> None:
        make(self, *args, **{**more, "device_id": torch.device("cpu")})

    patches = contextlib.ExitStack()
    patches.enter_context(patch.object(FullyShardedDataParallel, "__init__", make_on_cpu))
    # What is "offloaded" from the CPU to the CPU is not copied, and its memory is freed: torch 2.13
    # then crashes.
    copied = partial(fsdp.FullStateDictConfig, offload_to_cpu=False)
    patches.enter_context(
        patch.object(
            fsdp, "FullStateDictConfig", lambda rank0_only, **_: copied(rank0_only=rank0_only)
        )
    )
    of_optimizer = partial(fsdp.api.FullOptimStateDictConfig, offload_to_cpu=False)
    patches.enter_context(
        patch.object(
            fsdp.api,
            "FullOptimStateDictConfig",
            lambda rank0_only, **_: of_optimizer(rank0_only=rank0_only),
        )
    )
    return patches


class CPU(CUDAAccelerator):
    """Lightning's FSDPStrategy asks for this class of accelerators; torch's FSDP runs on CPUs
    too."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu")] * (devices if isinstance(devices, int) else len(devices))

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True


class Module(TiedModel):
    """With the same weights everywhere, however it is built; `tied` and the kind of parameter
    groups are hyper parameters."""

    def __init__(self, tied: bool = True, kind: str = "decay") -> None:
        super().__init__(tied=tied)
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        assert self.model is not None
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.is_meta:
                    scale = 1.0 if parameter.ndim == 1 else 0.0
                    parameter.copy_(
                        scale + 0.05 * torch.randn(parameter.shape, generator=generator)
                    )
        if self.hparams["kind"] == "frozen":
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_("layers.1." not in name)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss

    def configure_optimizers(self) -> Any:
        assert self.model is not None
        if self.hparams["kind"] == "decay":
            return super().configure_optimizers()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.AdamW(parameters, lr=1e-3)


def lightning_losses(path: str, strategy: str, **options: Any) -> list[float]:
    """With DDP: "ddp"; with FSDP: "full" or "sharded"."""
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

    world_size = dist.get_world_size()
    values = MeanLosses()
    more: dict[str, Any] = {}
    kind: Any
    if strategy == "ddp":
        kind, more["gradient_clip_val"] = DDPStrategy(), 0.5
    else:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        more["accelerator"] = CPU()
        kind = FSDPStrategy(
            state_dict_type=strategy, auto_wrap_policy={LlamaDecoderLayer}, use_orig_params=True
        )
    trainer = quiet_trainer(
        strategy=kind,
        devices=world_size,
        max_steps=STEPS + MORE,
        callbacks=[values, SaveAt(path)],
        use_distributed_sampler=False,
        enable_checkpointing=False,
        **more,
    )
    with fsdp_on_cpu():
        trainer.fit(Module(**options), datamodule=DealtText(GLOBAL_BATCH // world_size))
    return values.losses[STEPS:]


def deepspeed_losses(
    folder: str, stage: int, dtype: str = "float32", client: str | None = None, **options: Any
) -> list[float]:
    """DeepSpeed's own engine and loop; its loss is the mean over the ranks'.

    Args:
        client: a file of Lightning, whose dict is handed to the engine as Lightning's
            DeepSpeedStrategy does it.
    """
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    # Modules and parameters are counted for ever, and ranks of the pool have taken part in
    # different fits.
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = Init.param_id = 0

    __compatible_ops__["deepspeed_shm_comm"] = False
    module = Module(**options)
    module.configure_model()
    made = module.configure_optimizers()
    optimizer, scheduler = (
        (made["optimizer"], made["lr_scheduler"]["scheduler"])
        if isinstance(made, dict)
        else (made, None)
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world_size,
        "zero_optimization": {
            "stage": stage,
            "sub_group_size": 10_000,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    rows = RepeatingText(64, seed=1).rows
    losses = []
    steps, state = STEPS_DEEPSPEED, {}
    if client is not None:
        saved = torch.load(client, weights_only=True)
        steps, state = (
            STEPS,
            {
                key: value
                for key, value in saved.items()
                if key not in ("state_dict", "optimizer_states")
            },
        )
    for step in range(steps + MORE):
        if step == steps:
            engine.save_checkpoint(folder, tag="checkpoint", client_state=state)
        start = step % 4 * GLOBAL_BATCH
        mine: Tensor = rows[start : start + GLOBAL_BATCH][rank::world_size]
        loss = engine(mine, labels=mine)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / world_size)
    engine.destroy()
    return losses[steps:]
