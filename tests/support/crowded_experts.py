"""A DeepSeek-V3 whose routers send all tokens to two experts of eight, and so none to some
ranks."""

from parity import Module
from torch import nn

# the group of two from which DeepSeek-V3's routers choose; on one expert-parallel rank of two or
# four, on two of eight
HOT = (2, 3)


def crowd(module: nn.Module) -> None:
    """Let every router that is here choose the hot ones for every token."""
    for name, bias in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.zero_()[list(HOT)] = 10.0


class Crowded(Module):
    def on_train_start(self) -> None:
        assert self.model is not None
        crowd(self.model)
