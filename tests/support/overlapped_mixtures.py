"""Mixtures with a shared expert on this rank, which may run while tokens travel to the others, and
the events of an exchange."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DeepseekV3Config, Qwen2MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from lightning_3d.layout import Layout
from lightning_3d.models.parallel_plan import Cut, ParallelPlan
from lightning_3d.parallel import gloo_exchange
from lightning_3d.parallel.expert import ExpertParallel, overlap_exchange, shard_experts
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import cut_along

EXPERTS, HIDDEN, TOKENS = 8, 16, 5
SIZES = {"hidden_size": HIDDEN, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
PLAN = ParallelPlan(
    {
        "mlp.experts": Cut("ep_dispatch_experts"),
        "mlp.experts.gate_up_proj": Cut("grouped_gemm"),
        "mlp.experts.down_proj": Cut("grouped_gemm"),
    }
)


def deepseek() -> nn.Module:
    """Calls its shared expert after the others."""
    return DeepseekV3MoE(
        DeepseekV3Config(
            **SIZES, n_routed_experts=EXPERTS, n_group=4, topk_group=2, n_shared_experts=1
        )
    )


def qwen() -> nn.Module:
    """Calls its shared expert before the router, and its gate after the others."""
    return Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(**SIZES, num_experts=EXPERTS, shared_expert_intermediate_size=12)
    )


BLOCKS = {"deepseek": (deepseek, "shared_experts"), "qwen": (qwen, "shared_expert")}


def make(block: str, *, overlap: bool, node_size: int | None) -> nn.Module:
    """This rank's part of a mixture with the same values in every call, named `mlp`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = nn.ModuleDict({"mlp": BLOCKS[block][0]()})
    module["mlp"].experts.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    share = EXPERTS // size
    specs = {
        name: cut_along(name, value.shape, 0, [(rank * share, share)], tp_replicas=(0,))
        for name, value in module.named_parameters()
        if ".experts." in name
    }
    if overlap:
        overlap_exchange(module, PLAN)
    nodes = Mesh(Layout(dp=size, ep=size), node_size=node_size).expert_nodes
    shard_experts(module, PLAN, specs, ExpertParallel(dist.group.WORLD, size, rank, nodes=nodes))
    return module["mlp"]


def run(mlp: nn.Module, between: Callable[[], Any] = lambda: None) -> list[Tensor]:
    """Output and gradients of one forward and backward."""
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    hidden = torch.randn(1, TOKENS, HIDDEN, generator=generator, requires_grad=True)
    inside = hidden * 1  # gradients of several uses are added up here
    output = mlp(inside)
    between()
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    return [output.detach(), hidden.grad, *(parameter.grad for parameter in mlp.parameters())]  # type: ignore[list-item]


@contextlib.contextmanager
def exchanges(
    sent: Callable[[], Any], arrived: Callable[[], Any], hidden: int = HIDDEN
) -> Iterator[None]:
    """Call `sent` when an all-to-all of hidden states starts, and `arrived` when it has been waited
    for."""
    original = gloo_exchange.start_all_to_all

    class Watched:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            self._work.wait()
            arrived()

    def send(output: Tensor, x: Tensor, *args: Any) -> Any:
        work = original(output, x, *args)
        if x.ndim != 2 or x.shape[1] != hidden:
            return work
        sent()
        return Watched(work)

    with patch.object(gloo_exchange, "start_all_to_all", send):
        yield
