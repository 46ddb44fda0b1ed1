"""The experts of a small mixture, without a router."""

import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts


def small_experts(count: int, hidden: int) -> nn.ModuleDict:
    """`{"experts": MixtralExperts}`, in float64, the same on every rank."""
    config = MixtralConfig(hidden_size=hidden, intermediate_size=10, num_local_experts=count)
    config._experts_implementation = "eager"
    experts = MixtralExperts(config).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return nn.ModuleDict({"experts": experts})
