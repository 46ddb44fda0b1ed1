"""Initial weights: the same for every layout, with the distribution of the module's own
initializer."""

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
import transformers
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.pipeline import PipelineState, assign_stages, keep_owned
from lightning_3d.parallel.sharding import ShardSpec, cut_along
from lightning_3d.parallel.tensor import TensorParallel, rewrite, shard_specs
from lightning_3d.weights import blueprint as initializers
from lightning_3d.weights.blueprint import Blueprint, seed_of
from lightning_3d.weights.initialize import broadcast_eager, initialize

GPT2 = "gpt2"
NO_DROPOUT = SimpleNamespace(enabled=False, layer=lambda index: None)


def build(family: str, layers: int = 2) -> nn.Module:
    if family != GPT2:
        return models.build(family, layers)
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=layers,
        n_head=4,
        vocab_size=67,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def on_meta(family: str, layers: int = 2, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return in_dtype(family, layers, dtype)


def in_dtype(family: str, layers: int, dtype: torch.dtype) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build(family, layers)
    finally:
        torch.set_default_dtype(before)


def initialized(family: str, layers: int = 2, seed: int = 0, **options: Any) -> nn.Module:
    module = on_meta(family, layers)
    initialize(module, seed, **options)
    return module


def assert_same(module: nn.Module, other: nn.Module) -> None:
    mine, others = module.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, others[name]), name


# Like the module's own initializer


@pytest.mark.parametrize("family", [*models.MODELS, GPT2])
def test_distribution_is_that_of_an_ordinary_construction(family: str) -> None:
    torch.manual_seed(0)
    eager, module = build(family), initialized(family)
    assert dict(module.named_parameters()).keys() == dict(eager.named_parameters()).keys()
    for name, expected in eager.named_parameters():
        value = module.get_parameter(name)
        assert value.dtype == expected.dtype and value.requires_grad == expected.requires_grad
        spread, count = expected.std().item(), expected.numel()
        if spread == 0:
            assert torch.equal(value, expected), name
            continue
        # Six standard errors of the difference of two samples.
        assert (
            abs(value.mean().item() - expected.mean().item()) < 6 * spread * (2 / count) ** 0.5
        ), name
        assert abs(value.std().item() / spread - 1) < 6 / count**0.5, name


def test_residual_projections_of_gpt2_are_scaled_by_depth() -> None:
    module = initialized(GPT2, layers=8)
    projections = torch.stack([block.mlp.c_proj.weight for block in module.transformer.h])
    assert projections.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.02)
    assert module.transformer.h[0].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_row_of_the_padding_token_is_zero() -> None:
    embedding = initialized("llama").get_input_embeddings()
    assert embedding.padding_idx == 0
    assert not embedding.weight[0].any() and embedding.weight[1:].any(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", [*models.MODELS, GPT2])
def test_buffers_equal_those_of_an_ordinary_construction(family: str, dtype: torch.dtype) -> None:
    module = on_meta(family, dtype=dtype)
    initialize(module)
    expected = dict(in_dtype(family, 2, dtype).named_buffers())
    buffers = dict(module.named_buffers())
    assert buffers.keys() == expected.keys()
    for name, buffer in buffers.items():
        assert buffer.dtype == expected[name].dtype and torch.equal(buffer, expected[name]), name


ROPE = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "factor": 2.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", ROPE)
def test_every_kind_of_rotary_embedding_is_rebuilt(kind: str) -> None:
    settings = models.COMMON | {"vocab_size": 64, "num_hidden_layers": 1}
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPE[kind]}
    config = transformers.LlamaConfig(**settings, rope_parameters=rope)
    eager = transformers.LlamaForCausalLM(config)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(copy.deepcopy(config))
    initialize(module)
    assert torch.equal(module.model.rotary_emb.inv_freq, eager.model.rotary_emb.inv_freq)
    assert torch.equal(
        module.model.rotary_emb.original_inv_freq, eager.model.rotary_emb.original_inv_freq
    )
    assert module.model.rotary_emb.attention_scaling == eager.model.rotary_emb.attention_scaling


# A function of (seed, full name, initializer)


def test_same_seed_same_weights_and_another_seed_others() -> None:
    assert_same(initialized("llama", seed=3), initialized("llama", seed=3))
    other = initialized("llama", seed=4).lm_head.weight
    assert not torch.equal(initialized("llama", seed=3).lm_head.weight, other)


def test_seeds_are_the_same_on_every_machine() -> None:
    """The first eight bytes of BLAKE2b. Ranks of tests are forked: among them nothing shows what
    differs between interpreters."""
    assert seed_of(0, "model.lm_head.weight") == 12321181223145813084


def test_parameters_of_equal_shape_differ() -> None:
    attention = initialized("qwen2").model.layers[0].self_attn
    assert not torch.equal(attention.q_proj.weight, attention.o_proj.weight)


def test_prefix_stands_for_the_module_around() -> None:
    with torch.device("meta"):
        outer = nn.ModuleDict({"model": build("llama")})
    initialize(outer)
    assert_same(outer["model"], initialized("llama", prefix="model."))


def test_depth_does_not_change_the_first_layers() -> None:
    shallow, deep = initialized("llama", layers=2), initialized("llama", layers=4)
    assert_same(shallow.model.layers[1], deep.model.layers[1])


def test_generators_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    initialize(on_meta("llama"))
    assert torch.equal(torch.rand(3), expected)


def test_a_default_dtype_changes_nothing() -> None:
    module = on_meta("llama")
    torch.set_default_dtype(torch.float64)
    try:
        initialize(module)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(module, initialized("llama"))


def test_bfloat16_weights_are_the_rounded_float32_ones() -> None:
    expected = initialized("llama")
    cast, built = initialized("llama", dtype=torch.bfloat16), on_meta("llama", dtype=torch.bfloat16)
    initialize(built)
    for name, parameter in expected.named_parameters():
        assert torch.equal(cast.get_parameter(name), parameter.bfloat16()), name
        assert torch.equal(built.get_parameter(name), parameter.bfloat16()), name
    assert cast.model.rotary_emb.inv_freq.dtype == torch.float32


# Every layout


def part(family: str, layout: Layout, tp_rank: int, pp_rank: int) -> tuple[nn.Module, dict]:
    """What one rank initializes, as `assemble` does it; the module with its specifications."""
    root = nn.ModuleDict({"model": on_meta(family, layers=4)})
    module = root["model"]
    plan = read_plan(module, models.PlainModel.plan if family == models.PLAIN else None)
    blueprint = Blueprint(root)
    specs = shard_specs(module, plan, layout.tp, tp_rank)
    assignment = assign_stages(module, plan, layout, "1F1B")
    keep_owned(root, "model", plan, assignment, pp_rank, PipelineState(NO_DROPOUT))
    local = {name: specs[name] for name, _ in module.named_parameters()}
    if layout.tp > 1:
        rewrite(module, plan, local, TensorParallel(None, layout.tp, tp_rank))
    full_names = {f"model.{name}": renamed(spec) for name, spec in local.items()}
    initialize(root, 7, specs=full_names, blueprint=blueprint)
    return root, full_names


def renamed(spec: ShardSpec) -> ShardSpec:
    return spec.renamed(
        f"model.{spec.name}", tied_to=f"model.{spec.tied_to}" if spec.tied_to else None
    )


@pytest.mark.parametrize("layout", by_default(["tp2", "pp2", "tp4_pp2", "pp4", "tp2_pp2"], 4))
@pytest.mark.parametrize("family", models.MODELS)
def test_a_rank_holds_its_part_of_what_one_process_has(family: str, layout: str) -> None:
    whole = nn.ModuleDict({"model": on_meta(family, layers=4)})
    initialize(whole, 7)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    buffers = dict(whole.named_buffers())
    degrees, found = Layout.parse(layout), set()
    for tp_rank in range(degrees.tp):
        for pp_rank in range(degrees.pp):
            root, specs = part(family, degrees, tp_rank, pp_rank)
            for name, parameter in root.named_parameters():
                found.add(name)
                assert torch.equal(parameter, specs[name].cut(expected[name])), name
            for name, buffer in root.named_buffers():
                assert torch.equal(buffer, buffers[name]), name
    assert {name for name, _ in whole.named_parameters()} <= found


def test_a_copy_tied_across_stages_has_the_values_of_the_embedding() -> None:
    first, _ = part("qwen2", Layout.parse("pp2"), 0, 0)
    last, _ = part("qwen2", Layout.parse("pp2"), 0, 1)
    embedding = first["model"].model.embed_tokens.weight
    assert torch.equal(last["model"].lm_head.weight, embedding)
    assert not embedding[0].any(), (
        "the padding row of an embedding, which a linear head alone would not have"
    )


def test_a_tied_copy_without_its_origin_is_refused() -> None:
    module = nn.Linear(4, 6, bias=False, device="meta")
    spec = ShardSpec(
        "weight",
        (6, 4),
        cut_along("weight", (6, 4), 0, [(0, 6)], tp_replicas=(0,)).boxes,
        tied_to="embed.w",
    )
    with pytest.raises(
        ConfigError, match=r"tied to 'embed\.w', but the model to initialize does not contain"
    ):
        initialize(module, specs={"weight": spec})


def test_initializers_see_global_sizes_and_head_counts_through_the_blueprint() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = 4
            self.gain = nn.Parameter(torch.empty(8))

        def reset_parameters(self) -> None:
            nn.init.constant_(self.gain, 1 / self.heads)

    with torch.device("meta"):
        module = Heads()
        blueprint = Blueprint(module)
        module.heads = 2
        module.gain = nn.Parameter(torch.empty(4))
    spec = cut_along("gain", (8,), 0, [(0, 4)], tp_replicas=(0,))
    initialize(module, specs={"gain": spec}, blueprint=blueprint)
    assert torch.equal(module.gain, torch.full((4,), 0.25))


def test_a_cut_that_does_not_fit_is_refused() -> None:
    module = nn.Linear(4, 6, bias=False, device="meta")
    with pytest.raises(ConfigError, match=r"\(2, 4\), but the parameter has shape \(6, 4\)"):
        initialize(
            module, specs={"weight": cut_along("weight", (6, 4), 0, [(0, 2)], tp_replicas=(0,))}
        )


# Memory, time, and what is left alone


class Transient(TorchDispatchMode):
    """Largest number of bytes in memory at once beside the finished parameters and buffers of a
    module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.peak = 0
        self._module = module
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._alive[id(tensor)] = weakref.ref(tensor)
        alive = {
            key: tensor
            for key, reference in self._alive.items()
            if (tensor := reference()) is not None
        }
        self._alive = {key: self._alive[key] for key in alive}
        finished = {
            storage(t)
            for t in [*self._module.parameters(), *self._module.buffers()]
            if not t.is_meta
        }
        self.peak = max(
            self.peak, sum(size for _, size in {storage(t) for t in alive.values()} - finished)
        )
        return result


def storage(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of what a tensor keeps alive."""
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", by_default([None, torch.bfloat16], 1))
def test_one_full_parameter_at_a_time(dtype: torch.dtype | None) -> None:
    module = on_meta("llama", layers=4)
    specs = shard_specs(module, read_plan(module), 2, 0)
    rewrite(module, read_plan(module), specs, TensorParallel(None, 2, 0))
    gc.collect()
    with Transient(module) as watched:
        initialize(module, specs=specs, dtype=dtype)
    spec = max(specs.values(), key=lambda spec: spec.global_shape[0] * spec.global_shape[-1])
    full, shard = (4 * torch.Size(shape).numel() for shape in (spec.global_shape, spec.local_shape))
    assert full <= watched.peak <= full + shard, (
        "the full parameter, and the shard that is being cut out of it"
    )


def test_work_grows_with_the_model_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = initializers._run
    monkeypatch.setattr(initializers, "_run", lambda call: (calls.append(call), run(call)))
    counts = []
    for layers in (4, 8, 12):
        calls.clear()
        initialized("llama", layers)
        counts.append(len(calls))
    assert counts[2] - counts[1] == counts[1] - counts[0]


def test_a_second_call_changes_nothing() -> None:
    module = initialized("llama")
    expected = {
        name: (id(tensor), tensor.clone())
        for name, tensor in module.state_dict(keep_vars=True).items()
    }
    initialize(module, 99)
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert id(tensor) == expected[name][0] and torch.equal(tensor, expected[name][1])


def test_what_is_in_memory_keeps_its_values() -> None:
    module = on_meta("llama")
    module.lm_head = nn.Linear(32, 67, bias=False)
    head, expected = module.lm_head.weight, module.lm_head.weight.clone()
    initialize(module)
    assert module.lm_head.weight is head and torch.equal(head, expected)
    module.lm_head = nn.Linear(32, 67, bias=False)
    rest = initialized("llama")
    assert_same(module.model, rest.model)


def test_tied_parameters_stay_one() -> None:
    module = initialized("qwen2")
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_frozen_parameters_stay_frozen_and_keep_their_marks() -> None:
    module = on_meta("llama")
    module.lm_head.weight.requires_grad_(False).no_weight_decay = True
    initialize(module)
    assert not module.lm_head.weight.requires_grad and module.lm_head.weight.no_weight_decay
    assert module.model.norm.weight.requires_grad


def test_flags_of_transformers_neither_prevent_nor_undo_the_initialization() -> None:
    module = on_meta("llama")
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor._is_hf_initialized = True
    initialize(module)
    assert_same(module, initialized("llama"))
    assert module.model.rotary_emb.inv_freq.any()
    module.init_weights()
    assert_same(module, initialized("llama"))


def test_an_initialized_model_runs() -> None:
    module = initialized("gemma3", layers=3)
    loss = module(input_ids=torch.arange(1, 9)[None], labels=torch.arange(1, 9)[None]).loss
    assert loss.item() == pytest.approx(torch.tensor(70.0).log().item(), abs=0.3)


# A model in memory: rank 0's values for all


def _broadcast(dtypes: list[str]) -> dict[str, Tensor]:
    from torch import distributed as dist

    torch.manual_seed(dist.get_rank())
    module = nn.ModuleList(nn.Linear(3, 2, dtype=getattr(torch, kind)) for kind in dtypes)
    module.register_buffer("flags", torch.rand(4) > 0.5)
    module.register_buffer("scalar", torch.rand(()))
    module.register_parameter("later", nn.Parameter(torch.empty(3, device="meta")))
    broadcast_eager(module, SimpleNamespace(layout=SimpleNamespace(world_size=2)))
    return {name: tensor for name, tensor in module.state_dict().items() if not tensor.is_meta}


def test_a_model_in_memory_gets_the_values_of_rank_0() -> None:
    first, second = run_ranks(_broadcast, 2, ["float32", "float64", "bfloat16"])
    assert first.keys() == second.keys() and len(first) == 8
    assert all(torch.equal(first[name], second[name]) for name in first)


def _broadcast_different_models() -> str:
    from torch import distributed as dist

    module = nn.Linear(3, 2 + dist.get_rank())
    try:
        broadcast_eager(module, SimpleNamespace(layout=SimpleNamespace(world_size=2)))
    except ConfigError as error:
        return str(error)
    return ""


def test_different_models_are_refused_on_every_rank() -> None:
    messages = run_ranks(_broadcast_different_models, 2)
    assert all(
        message.startswith("Not all ranks built the same model: 2 tensors") for message in messages
    )
    assert "they differ in 'bias' and 'weight'" in messages[1]
