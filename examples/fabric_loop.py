"""Train with Lightning Fabric for ranks, data and logs, and an engine for the model.

python examples/fabric_loop.py
python examples/fabric_loop.py --layout pp2_dp2
"""

import argparse

import torch
from lightning.fabric import Fabric
from plain_loop import counting_rows, make_model
from torch.utils.data import DataLoader, DistributedSampler

from lightning_3d import Engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="tp2_dp2")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    # starts the ranks; the engine takes their process group
    fabric = Fabric(accelerator="cpu", devices=options.devices, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1)
    engine = Engine(
        make_model,
        options.layout,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3),
        micro_batch_size=2,
        zero_stage=1,
        device=fabric.device,
    )
    rows = counting_rows()
    sampler = DistributedSampler(rows, **engine.distributed_sampler_kwargs)
    loader = DataLoader(
        rows, batch_size=16 // engine.distributed_sampler_kwargs["num_replicas"], sampler=sampler
    )
    # Without Fabric's own sampler, which would give each rank other rows. The model is not set up:
    # the engine has it.
    batches = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    while engine.steps < options.steps:
        for batch in batches:
            engine.forward_backward(batch)
            numbers = engine.optimizer_step()
            if engine.steps == options.steps:
                break
    engine.close()
    fabric.print(f"loss after {engine.steps} steps: {numbers.loss:.3f}")


if __name__ == "__main__":
    main()
