"""Tokens that travel by DeepEP: exact against one process, over a stand-in of its interface; refusals of what it cannot do.

DeepEP itself runs on GPUs only, so its kernels are not tested here.
"""

import contextlib
import inspect
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deep_ep_stand_in
import parity
import pytest
import torch
import torch.distributed as dist
from deep_ep_stand_in import LOG, Buffer, make_module
from ranks import run_ranks
from reference import Recipe, data
from small_experts import small_experts
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from lightning_3d.config.options.experts import ExpertOptions
from lightning_3d.config.options.token_exchange import check_deepep_machine, check_deepep_ranks, check_deepep_sizes
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.models.parallel_plan import Cut, ParallelPlan
from lightning_3d.parallel.expert import DeepEP, ExpertParallel, overlap_exchange, shard_experts
from lightning_3d.parallel.expert.deepep_library import INTERFACE, require_exchange
from lightning_3d.parallel.sharding import cut_along
from lightning_3d.strategy import Lightning3DStrategy

RANKS, EXPERTS, HIDDEN, CHOICES = 4, 8, 16, 3
LOADS = {
    "different numbers of tokens": [7, 1, 4, 2],
    "a rank without tokens": [3, 0, 5, 1],
    "one token in all": [0, 0, 1, 0],
    "no tokens at all": [0, 0, 0, 0],
}


def tokens_of(rank: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts (both of a rank, and one of another one, for each second token), weights."""
    generator = torch.Generator().manual_seed(10 + rank)
    hidden = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    chosen = torch.rand(rows, EXPERTS, generator=generator).argsort(-1)[:, :CHOICES]
    chosen[::2] = torch.tensor([5, 2, 4])
    weights = torch.rand(rows, CHOICES, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), chosen, weights.requires_grad_()


def sharded(module: nn.Module, name: str, dropped: bool = False) -> None:
    """Keep this rank's experts of the world, between which tokens travel by the stand-in."""
    rank, share = dist.get_rank(), EXPERTS // dist.get_world_size()
    names = [f"{name}.gate_up_proj", f"{name}.down_proj"]
    plan = ParallelPlan({name: Cut("ep_dispatch_experts"), **{each: Cut("grouped_gemm") for each in names}})
    specs = {each: cut_along(each, module.get_parameter(each).shape, 0, [(rank * share, share)], tp_replicas=(0,)) for each in names}
    overlap_exchange(module, plan)
    deepep = DeepEP(dist.group.WORLD)
    shard_experts(module, plan, specs, ExpertParallel(dist.group.WORLD, dist.get_world_size(), rank, deepep=deepep))
    if dropped:
        module.get_submodule(name).drops = lambda: True  # type: ignore[assignment]


def dispatch(rows: list[int], dropped: bool) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Output and gradients of tokens and weights; gradients of this rank's experts; calls of the stand-in."""
    with deep_ep_stand_in.deep_ep_stand_in():
        module = small_experts(EXPERTS, HIDDEN)
        sharded(module, "experts", dropped)
        hidden, chosen, weights = tokens_of(dist.get_rank(), rows[dist.get_rank()])
        output = module["experts"](hidden, chosen, weights * (chosen != 2) if dropped else weights)
        output.square().sum().backward()
        assert hidden.grad is not None and weights.grad is not None
        experts = [parameter.grad for parameter in module["experts"].parameters()]
        return [output.detach(), hidden.grad, weights.grad], experts, list(LOG)  # type: ignore[return-value]


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("rows", LOADS.values(), ids=LOADS.keys())
def test_the_output_and_all_gradients_are_those_of_one_process(rows: list[int], dropped: bool) -> None:
    """Also where a token has two experts on one rank, and where pairs of weight 0 are not sent."""
    found = run_ranks(dispatch, RANKS, rows, dropped)
    module = small_experts(EXPERTS, HIDDEN)
    parts = [tokens_of(rank, number) for rank, number in enumerate(rows)]
    hidden, chosen, weights = (torch.cat([part[index] for part in parts]) for index in range(3))
    whole = module["experts"](hidden, chosen, weights * (chosen != 2) if dropped else weights)
    if whole.requires_grad:
        whole.square().sum().backward()
    starts = [sum(rows[:rank]) for rank in range(RANKS)]
    for (output, *gradients), start, part in zip((each[0] for each in found), starts, parts, strict=True):
        torch.testing.assert_close(output, whole[start : start + len(output)].detach(), rtol=1e-13, atol=1e-13)
        for gradient, leaf in zip(gradients, (part[0], part[2]), strict=True):
            expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    for index, parameter in enumerate(module["experts"].parameters()):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(torch.cat([each[1][index] for each in found]), expected, rtol=1e-12, atol=1e-12)


def test_the_backward_of_a_dispatch_is_a_combine_and_the_other_way_round() -> None:
    for _, _, log in run_ranks(dispatch, RANKS, LOADS["different numbers of tokens"], False):
        assert log == ["buffer", "dispatch", "arrived", "combine", "dispatch", "combine", "arrived"]


def with_shared_expert() -> nn.ModuleDict:
    """A mixture of DeepSeek-V3, the same on every rank."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
    module = nn.ModuleDict({"mlp": DeepseekV3MoE(DeepseekV3Config(**sizes, n_routed_experts=EXPERTS, n_shared_experts=1))})
    module["mlp"].experts.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module


def events() -> list[str]:
    """Calls of the stand-in and of the shared expert."""
    with deep_ep_stand_in.deep_ep_stand_in():
        module = with_shared_expert()
        sharded(module, "mlp.experts")
        shared = module["mlp"].shared_experts.gate_proj
        shared.register_forward_pre_hook(lambda *_: LOG.append("shared"))
        shared.weight.register_post_accumulate_grad_hook(lambda _: LOG.append("gradient of shared"))
        module["mlp"](torch.randn(1, 5, HIDDEN, requires_grad=True)).sum().backward()
        return list(LOG)


def test_the_shared_expert_runs_while_tokens_travel() -> None:
    forward, backward = ["dispatch", "shared", "arrived", "combine"], ["dispatch", "combine", "gradient of shared", "arrived"]
    assert run_ranks(events, 2) == [["buffer", *forward, *backward]] * 2


def halve(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A hook that changes the tokens of the experts when they have been sent."""
    return args[0] * 0.5, *args[1:]


def hooked() -> tuple[list[Tensor], list[Tensor], list[str]]:
    """(output and gradient, those with all experts on this rank, calls of the stand-in in the forward)."""
    with deep_ep_stand_in.deep_ep_stand_in():
        module, results, calls = with_shared_expert(), [], []
        module["mlp"].experts.register_forward_pre_hook(halve)
        for _ in range(2):
            tokens = torch.linspace(-1, 1, 3 * HIDDEN).view(1, 3, HIDDEN).requires_grad_()
            output = module["mlp"](tokens)
            calls = list(LOG)
            output.square().sum().backward()
            assert tokens.grad is not None
            results.append([output.detach(), tokens.grad])
            del output
            if len(results) == 1:
                sharded(module, "mlp.experts")
        return results[1], results[0], calls


def test_a_hook_may_change_what_was_sent() -> None:
    """What was sent is waited for and dropped."""
    for found, expected, calls in run_ranks(hooked, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)  # of up to a hundred
        assert calls == ["buffer", "dispatch", "arrived", "dispatch", "arrived", "combine"]


def train_by_deepep(recipe: Any, **strategy: Any) -> Any:
    with deep_ep_stand_in.deep_ep_stand_in():
        part = parity.train_on_rank(recipe, moe_exchange="deepep", **strategy)
        assert LOG.count("buffer") == 1 and LOG.count("dispatch") > 1 and LOG.count("combine") > 1
    return part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "options"),
    [
        ("mixtral", "ep2_dp2", {"dtype": "float64"}),
        ("deepseek_v3", "ep2_dp2", {"dtype": "float64"}),
        pytest.param("mixtral", "ep4_dp4", {"dtype": "float64"}, marks=pytest.mark.full),
        pytest.param("mixtral", "ep2_pp2_dp2", {"dtype": "float64", "schedule": "InterleavedZeroBubble"}, marks=pytest.mark.full),
        pytest.param("deepseek_v3", "tp2_ep4_dp2", {"dtype": "float64", "sequence_parallel": False}, marks=pytest.mark.full),
        pytest.param("qwen2_moe", "tp2_ep4_dp2", {"recompute": "full", "zero": 1}, marks=pytest.mark.full),
    ],
)
def test_training_is_that_of_one_process(model: str, layout: str, options: dict[str, Any]) -> None:
    with patch.object(parity, "train_on_rank", train_by_deepep):
        parity.assert_same_training(model, layout, **options)


def other_exchange() -> str:
    recipe = Recipe("mixtral", layers=1, steps=1)
    module, rows = parity.Module(recipe), parity.Rows(data(recipe))
    arguments = {"layout": "ep2_dp2", "micro_batch_size": 4, "self_check": "never"}
    parity.fit_on_rank(recipe, rows, module, **arguments)
    said = pytest.warns(UserWarning, match="keep moe_node_size=None of an earlier")
    with said if dist.get_rank() == 0 else contextlib.nullcontext():
        parity.fit_on_rank(recipe, rows, module, moe_node_size=1, **arguments)
    with deep_ep_stand_in.deep_ep_stand_in(), pytest.raises(ConfigError) as refusal:
        parity.fit_on_rank(recipe, rows, module, moe_exchange="deepep", **arguments)
    return str(refusal.value)


def test_a_module_keeps_its_exchange_and_its_nodes() -> None:
    assert all("by moe_exchange=all_to_all of an earlier Trainer; got deepep" in said for said in run_ranks(other_exchange, 2))


def bf16_output() -> tuple[Tensor, Tensor, torch.dtype]:
    """Output and gradient of a rank in bf16, whose weights travel in float32."""
    with deep_ep_stand_in.deep_ep_stand_in():
        module = small_experts(EXPERTS, HIDDEN).bfloat16()
        sharded(module, "experts")
        hidden, chosen, weights = (part.detach() for part in tokens_of(dist.get_rank(), 6))
        hidden, weights = hidden.bfloat16().requires_grad_(), weights.bfloat16().requires_grad_()
        output = module["experts"](hidden, chosen, weights)
        output.float().square().sum().backward()
        return output.detach(), hidden.grad, weights.grad.dtype  # type: ignore[return-value, union-attr]


def test_bf16_agrees_with_float64_to_its_rounding() -> None:
    for rank, (output, gradient, weights) in enumerate(run_ranks(bf16_output, RANKS)):
        hidden, chosen, factors = tokens_of(rank, 6)
        expected = small_experts(EXPERTS, HIDDEN)["experts"](hidden, chosen, factors)
        expected.square().sum().backward()
        assert output.dtype == gradient.dtype == weights == torch.bfloat16
        for found, exact in ((output, expected.detach()), (gradient, hidden.grad)):
            assert exact is not None
            assert (found - exact).norm() < 0.03 * exact.norm()


# Refusals


def refused(text: str) -> Any:
    """Expect one line that ends with what works."""
    return pytest.raises(ConfigError, match=rf"^moe_exchange=deepep [^\n]*{text}[^\n]*\. Use moe_exchange=all_to_all\.$")


def test_only_where_its_kernels_run() -> None:
    with refused("needs NVIDIA GPUs, but this run is on the CPU"):
        check_deepep_machine("cpu", "bf16", None)
    for precision in ("fp32", "fp64", "bf16_mixed"):
        with refused(f"in bf16, but they have another type with precision={precision}"):
            check_deepep_machine("cuda", precision, (9, 0))
    with refused(r"compute capability 9\.0 or higher, such as H100; the GPUs of this machine have 8\.0"):
        check_deepep_machine("gpu", "bf16", (8, 0))
    check_deepep_machine("gpu", "bf16", None)
    check_deepep_machine("cuda", "bf16", (10, 0))


def test_only_sizes_that_its_kernels_have() -> None:
    for ranks, hidden in ((2, 24), (8, 8192), (16, 4100), (32, 8192)):
        with refused(f"but the model's is {hidden}"):
            check_deepep_sizes(ranks, hidden, None, None)
    with refused("ep 4 does not divide the model's 6 experts"):
        check_deepep_sizes(4, 4096, 6, 2)
    with refused("the model's 512 experts with ep 2 are 256 on each"):
        check_deepep_sizes(2, 2048, 512, 10)
    with refused("at most 32 experts, but the model chooses 64"):
        check_deepep_sizes(2, 2048, 64, 64)
    check_deepep_sizes(64, 7168, 256, 8)  # DeepSeek-V3
    check_deepep_sizes(8, 4096, 8, 2)  # Mixtral 8x7B


def test_only_ranks_between_which_it_can_send() -> None:
    for layout in ("dp4", "dp3_ep3", "dp128_ep128"):
        with refused("works with ep 2, 4, 8, 16, 32 or 64"):
            check_deepep_ranks(Layout.parse(layout), None)
    with refused("ranks 0, 1, 2 and 3 are on 2 nodes of 2 ranks"):
        check_deepep_ranks(Layout.parse("dp4_ep4"), 2)
    with refused("each 8 consecutive ranks of the 16"):
        check_deepep_ranks(Layout.parse("dp16_ep16"), 4)
    for layout, node_size in (("dp16_ep16", 8), ("dp4_ep4", 4), ("dp64_ep64", 8), ("dp16_ep8", 8), ("dp4_ep4", None)):
        check_deepep_ranks(Layout.parse(layout), node_size)


def test_a_strategy_refuses_it_before_ranks_meet() -> None:
    for precision, device, text in (("32-true", "cpu", "this run is on the CPU"), ("bf16-true", "cpu", "this run is on the CPU")):
        strategy = Lightning3DStrategy("dp2_ep2", moe_exchange="deepep", parallel_devices=[torch.device(device)] * 2)
        strategy.precision_plugin = SimpleNamespace(precision=precision)  # type: ignore[assignment]
        with refused(text):
            strategy._configure_launcher()
    with pytest.raises(ConfigError, match='moe_exchange must be all_to_all or deepep; got "deep_ep". Did you mean "deepep"'):
        Lightning3DStrategy("dp2_ep2", moe_exchange="deep_ep")
    with pytest.raises(ConfigError, match="moe_node_size=2 has no effect on moe_exchange=deepep.*moe_node_size=null"):
        Lightning3DStrategy("dp2_ep2", moe_exchange="deepep", moe_node_size=2)


def test_a_missing_package_is_refused() -> None:
    options = ExpertOptions(exchange="deepep")
    with (
        patch.object(ExpertOptions, "check_run", lambda *args: None),
        patch.dict(sys.modules),
        patch("importlib.util.find_spec", lambda name: None),
        refused("needs the package deep_ep 1.2.1 to 2.1, which is not installed"),
    ):
        require_exchange(options, Layout(dp=2, ep=2), None, torch.device("cpu"), "bf16")
    with patch.dict(sys.modules, {"deep_ep": None}), refused("needs deep_ep 1.2.1 to 2.1, but importing it fails"):
        DeepEP(None)  # type: ignore[arg-type]


class Renamed(Buffer):
    """An argument of the interface has another name."""

    def combine(self, x: Tensor, routing: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("replaced", "text"),
    [
        ({"__version__": "1.0.0"}, "needs deep_ep 1.2.1 to 2.1; version 1.0.0 is installed"),
        ({"__version__": "3.0"}, "version 3.0 is installed"),
        ({"Buffer": None}, "in version 1.2.1 Buffer.__init__ has no argument group"),
        ({"Buffer": Renamed}, "in version 1.2.1 Buffer.combine has no argument handle"),
    ],
)
def test_a_package_with_another_interface_is_refused(replaced: dict[str, Any], text: str) -> None:
    with patch.dict(sys.modules, {"deep_ep": make_module(**replaced)}), refused(text):
        DeepEP(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["1.2.1", "1.2.1+9af0e0d", "2.1.0", None])
def test_versions_with_this_interface_are_accepted(version: str | None) -> None:
    with patch.dict(sys.modules, {"deep_ep": make_module(__version__=version)}):
        DeepEP(None)  # type: ignore[arg-type]


def test_filled_memory_is_refused() -> None:
    """`check_torch_deterministic` of DeepEP 2.1."""
    torch.use_deterministic_algorithms(True)
    try:
        with patch.dict(sys.modules, {"deep_ep": make_module()}), refused("fill_uninitialized_memory = False"):
            DeepEP(None)  # type: ignore[arg-type]
        torch.utils.deterministic.fill_uninitialized_memory = False
        with patch.dict(sys.modules, {"deep_ep": make_module()}):
            DeepEP(None)  # type: ignore[arg-type]
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


def fails_to_connect() -> str:
    class NoNVLink(Buffer):
        def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
            raise AssertionError("GPU 0 and GPU 1 are not connected via NVLink")

    with patch.dict(sys.modules, {"deep_ep": make_module(Buffer=NoNVLink)}):
        try:
            DeepEP(dist.group.WORLD).buffer(HIDDEN, EXPERTS, CHOICES)
        except ConfigError as error:
            return str(error)
    return ""


def test_ranks_without_nvlink_are_refused() -> None:
    for message in run_ranks(fails_to_connect, 2):
        assert message == (
            "moe_exchange=deepep cannot make its buffers between 2 ranks (GPU 0 and GPU 1 are not connected via NVLink)."
            " Use moe_exchange=all_to_all."
        )


def test_the_stand_in_has_the_interface() -> None:
    for method, arguments in INTERFACE.items():
        assert set(arguments) <= set(inspect.signature(getattr(Buffer, method)).parameters)
