"""Train a Transformers model in a loop of your own, without a Trainer.

python examples/plain_loop.py
torchrun --nproc-per-node 4 examples/plain_loop.py tp2_pp2
"""

import argparse

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d import Engine


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def counting_rows(
    rows: int = 256, length: int = 32, vocabulary: int = 97
) -> list[dict[str, torch.Tensor]]:
    """Make rows that count upwards from a random token."""
    starts = torch.randint(vocabulary, (rows, 1), generator=torch.Generator().manual_seed(1))
    texts = (starts + torch.arange(length)) % vocabulary
    return [{"input_ids": text, "labels": text} for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "layout", nargs="?", help="such as tp2_pp2; data parallelism over all ranks by default"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", help="folder to write at the end")
    options = parser.parse_args()
    engine = Engine(
        make_model,  # called on the meta device: no rank ever has the whole model
        options.layout,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3),
        micro_batch_size=2,
        max_norm=1.0,
        seed=1,
    )
    dealt = engine.distributed_sampler_kwargs  # ranks that share rows read the same ones
    rows = counting_rows()
    sampler = DistributedSampler(rows, **dealt)
    loader = DataLoader(
        rows, batch_size=16 // dealt["num_replicas"], sampler=sampler, drop_last=True
    )
    with engine:
        while engine.steps < options.steps:
            for batch in loader:
                engine.forward_backward(batch)
                numbers = engine.optimizer_step()
                if engine.steps == options.steps:
                    break
        if options.checkpoint:
            engine.save(options.checkpoint)
        parameters = sum(tensor.numel() for _, tensor in engine.weights())
        if torch.distributed.get_rank() == 0:
            print(f"loss after {engine.steps} steps: {numbers.loss:.3f}, {parameters} parameters")


if __name__ == "__main__":
    main()
