"""A module that trains a part of its parameters, and the ZeRO modes that such fits are tested
with."""

from typing import Any

import parity
import torch

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0": (0, {}),
    "zero1": (1, {}),
    "zero1 scattered": (1, {"zero_reduce_scatter": True}),
    "zero2": (2, {"zero_reduce": "step"}),
    "zero2 eager": (2, {"zero_reduce": "micro_batch"}),
    "zero3": (3, {"zero_reduce": "step", "zero_gather": "step"}),
    "zero3 eager": (3, {"zero_reduce": "micro_batch", "zero_gather": "step"}),
    "zero3 by block": (3, {"zero_reduce": "step", "zero_gather": "micro_batch"}),
    "zero3 by block, eager": (3, {"zero_reduce": "micro_batch", "zero_gather": "micro_batch"}),
}


class Finetuned(parity.Module):
    """Gives the optimizer what is trained, as most scripts do."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        trained = filter(lambda parameter: parameter.requires_grad, self.parameters())
        return torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
