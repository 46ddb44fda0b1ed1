"""A model cut over tensor-parallel ranks computes what it computes on one process."""

import copy

import models
import pytest
import sharded
import torch
import torch.distributed as dist
from counting import recording
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.compat.torch import backward_input, backward_weight
from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import Cut
from lightning_3d.parallel.tensor import VocabParallelLogits, check_replicated_gradients
from lightning_3d.parallel.tensor.layers import ColumnParallelLinear

# Transformers computes some norms in float32 whatever the model's type, so sums over a rank's own
# heads round there: Gemma's weights of q_norm and k_norm always, Qwen3's where key heads are
# replicated.
FLOAT32_INSIDE = {("gemma3", 2), ("gemma3", 4), ("qwen3", 4)}


def tolerance(name: str, tp: int) -> float:
    return 3e-6 if (name, tp) in FLOAT32_INSIDE else 1e-12


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", models.MODELS)
def test_loss_logits_and_every_gradient_equal_one_process(name: str, tp: int) -> None:
    whole = sharded.run_whole(name)
    results = run_ranks(sharded.run_cut, tp, name)
    for result in results:
        assert result.loss == pytest.approx(whole.loss, abs=1e-12)
        assert torch.allclose(result.logits, whole.logits, rtol=0, atol=1e-12)
    for parameter, expected in whole.gradients.items():
        got = sharded.pasted(results, parameter)
        scale = expected.abs().max().clamp(min=1e-3)
        assert ((got - expected).abs().max() / scale) < tolerance(name, tp), parameter


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_lower_precisions_agree_to_their_rounding(dtype: torch.dtype, close: float) -> None:
    whole = sharded.run_whole("qwen2", dtype)
    results = run_ranks(sharded.run_cut, 2, "qwen2", dtype)
    assert results[0].loss == pytest.approx(whole.loss, rel=close)
    for parameter, expected in whole.gradients.items():
        got = sharded.pasted(results, parameter)
        assert got.dtype == dtype
        assert (got - expected).norm() <= close * expected.norm(), parameter


def count_collectives(name: str, layers: int) -> dict[str, list[str]]:
    model, ids = sharded.build(name, layers=layers), sharded.batch(name)
    sharded.cut(model, sharded.user_plan(name))
    names = {}
    with recording() as forward:
        logits = sharded.logits_of(model, ids)
    with recording() as of_the_loss:
        loss = sharded.loss_of(logits, ids)
    with recording() as backward:
        loss.backward()
    for part, recorder in (("forward", forward), ("loss", of_the_loss), ("backward", backward)):
        names[part] = sorted(call.name for call in recorder.calls)
    return names


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 2),
        ("llama", 4),
        ("qwen2", 2),
        ("qwen3", 2),
        ("gpt_neox", 2),
        ("gemma3", 4),
        ("phi3", 2),
        ("plain", 2),
    ],
)
def test_a_block_costs_two_all_reduces_forward_and_two_backward(name: str, tp: int) -> None:
    layers = 3
    counted = run_ranks(count_collectives, tp, name, layers)[0]
    assert counted["forward"] == ["all_reduce"] * (2 * layers + 1)  # and one for the embedding
    assert counted["loss"] == ["all_reduce"] * 2
    assert counted["backward"] == ["all_reduce"] * (2 * layers + 1)  # and one for the head


def test_a_gather_pair_stays_as_declared_where_key_heads_are_replicated() -> None:
    counted = run_ranks(count_collectives, 4, "phi3", 1)[0]
    assert counted["forward"] == ["all_gather_into_tensor"] + ["all_reduce"] * 3
    assert counted["backward"] == ["all_gather_into_tensor"] + ["all_reduce"] * 3


def run_without_gradients(mode: str) -> tuple[float, float]:
    whole, ids = sharded.build("llama"), sharded.batch("llama")
    model = sharded.twin(whole, sharded.cut)
    with torch.inference_mode() if mode == "inference" else torch.no_grad():
        difference = (
            (sharded.logits_of(model, ids) - sharded.logits_of(whole, ids)).abs().max().item()
        )
    # The copy that siblings share must not be left over from the forward without gradients.
    loss = sharded.loss_of(sharded.logits_of(model, ids), ids)
    loss.backward()
    expected = sharded.loss_of(sharded.logits_of(whole, ids), ids)
    expected.backward()
    norms = [m.model.layers[0].input_layernorm.weight.grad.norm().item() for m in (model, whole)]
    return difference, abs(norms[0] - norms[1])


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_without_gradients_the_outputs_are_the_same(mode: str) -> None:
    for logits, gradient in run_ranks(run_without_gradients, 2, mode):
        assert logits < 1e-12
        assert gradient < 1e-12


def run_checkpointed() -> tuple[float, list[str]]:
    ids = sharded.batch("llama")
    plain, recomputed = sharded.build("llama"), sharded.build("llama")
    for model in (plain, recomputed):
        sharded.cut(model)
    recomputed.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed.train()
    sharded.loss_of(sharded.logits_of(plain, ids), ids).backward()
    loss = sharded.loss_of(sharded.logits_of(recomputed, ids), ids)
    with recording() as backward:
        loss.backward()
    pairs = zip(plain.parameters(), recomputed.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs), [
        call.name for call in backward.calls
    ]


def test_recomputed_blocks_give_the_same_gradients() -> None:
    for difference, calls in run_ranks(run_checkpointed, 2):
        assert difference == 0.0
        assert set(calls) == {"all_reduce"}
        # Both sums of each of the two blocks come again at most; the last one need not, as nothing
        # was saved behind it.
        assert 5 + 2 * 1 <= len(calls) <= 5 + 2 * 2


def run_split_backward() -> float:
    """A stage's backward in two halves, as the zero-bubble schedules do it."""
    ids = sharded.batch("llama")
    model = sharded.build("llama")
    sharded.cut(model)
    hidden = torch.randn(
        3, models.SEQUENCE, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    parameters = [
        parameter for name, parameter in model.named_parameters() if "embed_tokens" not in name
    ]

    def forward(received: Tensor) -> Tensor:
        return sharded.loss_of(model(inputs_embeds=received).logits, ids)

    expected_input = hidden.clone().requires_grad_()
    forward(expected_input).backward()
    expected = [sharded.gradient_of(parameter) for parameter in parameters]
    model.zero_grad()
    received = hidden.clone().requires_grad_()
    work = backward_input(forward(received), None, received, parameters)
    assert work is not None
    backward_weight(parameters, work)
    assert received.grad is not None and expected_input.grad is not None
    differences = [(received.grad - expected_input.grad).abs().max().item()]
    pairs = zip(parameters, expected, strict=True)
    differences += [(parameter.grad - gradient).abs().max().item() for parameter, gradient in pairs]
    return max(differences)


def test_a_backward_in_two_halves_gives_the_same_gradients() -> None:
    assert max(run_ranks(run_split_backward, 2)) < 1e-14


class HandWritten(nn.Module):
    """Attention as many write it: head counts as attributes, grouped keys, a scale per head, a norm
    shared by heads."""

    def __init__(self, width: int = 32, n_heads: int = 4, n_kv_heads: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.groups = n_heads, n_kv_heads, n_heads // n_kv_heads
        self.head_dim = width // n_heads
        self.q = nn.Linear(width, width)
        self.kv_norm = nn.LayerNorm(self.head_dim)
        self.k, self.v = (
            nn.Linear(width, n_kv_heads * self.head_dim, bias=False) for _ in range(2)
        )
        self.o = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(n_heads))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.kv_norm(self.k(x).view(b, s, self.n_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v(x).view(b, s, self.n_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True
        ) * self.scale.view(1, -1, 1, 1)
        return self.o(mixed.transpose(1, 2).reshape(b, s, -1))


HAND_WRITTEN_PLAN = {
    "q": "colwise",
    "k": "colwise",
    "v": "colwise",
    "o": "rowwise",
    "scale": "colwise",
}


def run_hand_written(plan: dict[str, str | Cut]) -> float:
    """Largest relative error of output and gradients; checks replicated gradients first."""
    torch.manual_seed(0)
    whole = HandWritten().double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    whole(x).square().sum().backward()
    model = copy.deepcopy(whole)
    model.zero_grad()
    _, specs = sharded.cut(model, {"tp": plan}, example=x)
    out = model(x)
    out.square().sum().backward()
    check_replicated_gradients(model, specs, dist.group.WORLD)
    gradients = sharded.summed_gradients(model, specs)
    errors = [(out - whole(x)).abs().max().item()]
    for name, parameter in whole.named_parameters():
        difference = (gradients[name] - specs[name].cut(parameter.grad)).abs().max()
        # A shift of all keys changes no softmax, so the gradient of the norm's bias is zero but for
        # rounding.
        errors.append((difference / parameter.grad.abs().max().clamp(min=1e-3)).item())
    return max(errors)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_hand_written_attention_with_head_counts_as_attributes(tp: int) -> None:
    plan = {**HAND_WRITTEN_PLAN, "kv_norm": "replicated_with_grad_allreduce"}
    assert max(run_ranks(run_hand_written, tp, plan)) < 1e-12


def test_a_partial_gradient_that_the_plan_forgot_is_named() -> None:
    with pytest.raises(PlanError, match="'kv_norm.weight'.*replicated_with_grad_allreduce"):
        run_ranks(run_hand_written, 2, HAND_WRITTEN_PLAN)


class Packed(nn.Module):
    """Query, key and value in one matrix, gate and up in another."""

    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.width = width // heads
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate_up, self.down = nn.Linear(width, 2 * 30), nn.Linear(30, width, bias=False)
        self.both = nn.Linear(2 * 30, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        x = x + self.o(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(gate.sigmoid() * up) + self.both(torch.cat([gate, up], dim=-1))


def run_packed() -> float:
    torch.manual_seed(0)
    whole = Packed().double()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    whole(x).square().sum().backward()
    model = copy.deepcopy(whole)
    model.zero_grad()
    plan = {
        "qkv": Cut("packed_colwise", units=4, parts=(24, 24, 24)),
        "o": "rowwise",
        "gate_up": "packed_colwise",
        "down": "rowwise",
        "both": "packed_rowwise",
    }
    _, specs = sharded.cut(model, {"tp": plan})
    model(x).square().sum().backward()
    gradients = sharded.summed_gradients(model, specs)
    return max(
        (gradients[n] - specs[n].cut(p.grad)).abs().max().item()
        for n, p in whole.named_parameters()
    )


def test_packed_styles_cut_each_part_by_itself() -> None:
    assert max(run_ranks(run_packed, 2)) < 1e-11


class OwnLinear(nn.Linear):
    """A user's layer on top of PyTorch's."""

    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class OwnEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


class WithOwnLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = OwnEmbedding(11, 8, padding_idx=9)
        self.hidden = nn.Embedding(5, 8)
        self.up, self.down = OwnLinear(8, 10), OwnLinear(10, 8)
        self.wide, self.narrow = nn.Linear(8, 7), nn.Linear(7, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.hidden(ids % 5)
        return self.down(self.up(x)) + self.narrow(self.wide(x).tanh())


def run_own_layers() -> tuple[float, bool]:
    torch.manual_seed(0)
    whole = WithOwnLayers().double()
    ids = torch.arange(11)
    whole(ids).square().sum().backward()
    model = copy.deepcopy(whole)
    model.zero_grad()
    plan = {
        "embed": "embedding_rowwise",
        "hidden": "embedding_colwise",
        "up": "colwise",
        "down": "rowwise",
        "wide": "colwise_gather_output",
        "narrow": "rowwise_split_input",
    }
    _, specs = sharded.cut(model, {"tp": plan})
    model(ids).square().sum().backward()
    kept = isinstance(model.up, OwnLinear) and isinstance(model.up, ColumnParallelLinear)
    error = max(
        (sharded.gradient_of(model.get_parameter(n)) - specs[n].cut(p.grad)).abs().max().item()
        for n, p in whole.named_parameters()
    )
    return error, kept


def test_subclasses_of_layers_keep_what_they_add_and_rows_may_be_uneven() -> None:
    for error, kept in run_ranks(run_own_layers, 2):
        assert error < 1e-12
        assert kept


class Repeated(nn.Module):
    """The same block twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        block = HandWritten()
        self.blocks = nn.ModuleList([block, block])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def run_repeated() -> float:
    torch.manual_seed(0)
    whole = Repeated().double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    whole(x).square().sum().backward()
    model = copy.deepcopy(whole)
    model.zero_grad()
    plan = {**HAND_WRITTEN_PLAN, "kv_norm": "replicated_with_grad_allreduce"}
    _, specs = sharded.cut(
        model, {"tp": {f"blocks.*.{name}": style for name, style in plan.items()}}, example=x
    )
    assert specs["blocks.1.q.weight"].tied_to == "blocks.0.q.weight"
    model(x).square().sum().backward()
    gradients = sharded.summed_gradients(model, specs)
    return max(
        (
            (gradients[n] - specs[n].cut(p.grad)).abs().max() / p.grad.abs().max().clamp(min=1e-3)
        ).item()
        for n, p in whole.named_parameters()
    )


def test_a_block_that_is_used_twice_is_cut_once() -> None:
    assert max(run_ranks(run_repeated, 2)) < 1e-10


def run_compiled() -> tuple[float, int]:
    """Difference of gradients from those of uncompiled blocks, and how often tracing had to
    stop."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # other tests ran on this rank
    ids = sharded.batch("llama")
    plain, compiled = sharded.build("llama"), sharded.build("llama")
    for model in (plain, compiled):
        sharded.cut(model)
    for block in compiled.model.layers:
        block.compile(backend="eager")
    for model in (plain, compiled):
        sharded.loss_of(sharded.logits_of(model, ids), ids).backward()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    pairs = zip(plain.parameters(), compiled.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs), breaks


@pytest.mark.slow
def test_blocks_compile_without_a_break() -> None:
    for difference, breaks in run_ranks(run_compiled, 2):
        assert difference < 1e-14
        assert breaks == 0


def run_copies() -> tuple[bool, bool, bool]:
    model, ids = sharded.build("qwen2"), sharded.batch("qwen2")
    sharded.cut(model)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    logits = sharded.logits_of(model, ids)
    copied = copy.deepcopy(model)
    same = torch.equal(sharded.logits_of(copied, ids).full(), logits.full())
    apart = (
        copied.model.layers[0].mlp.up_proj.tp_region
        is not model.model.layers[0].mlp.up_proj.tp_region
    )
    return tied, same, apart


def test_tied_layers_stay_one_parameter_and_models_can_be_copied() -> None:
    assert run_ranks(run_copies, 2) == [(True, True, True)] * 2


def run_checkpoint_function() -> float:
    """Recomputing a part that begins inside a region's parent."""
    torch.manual_seed(0)
    model = HandWritten().double()
    x = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    sharded.cut(
        model, {"tp": {**HAND_WRITTEN_PLAN, "kv_norm": "replicated_with_grad_allreduce"}}, example=x
    )
    model(x).square().sum().backward()
    expected = x.grad.clone()
    x.grad = None
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    difference = (x.grad - expected).abs().max().item()
    x.grad = None
    checkpoint(model, x, use_reentrant=True).square().sum().backward()
    return max(difference, (x.grad - expected).abs().max().item())


def test_both_kinds_of_recomputation_reduce_the_input_gradient_once() -> None:
    assert max(run_ranks(run_checkpoint_function, 2)) == 0.0


def run_autocast() -> tuple[torch.dtype, float]:
    model, whole, ids = (
        sharded.build("llama", torch.float32),
        sharded.build("llama", torch.float32),
        sharded.batch("llama"),
    )
    sharded.cut(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = sharded.logits_of(model, ids)
        expected = sharded.logits_of(whole, ids)
        sharded.loss_of(logits, ids).backward()
    assert isinstance(logits, VocabParallelLogits)
    return logits.dtype, (logits.float() - expected.float()).abs().max().item()


def test_autocast_computes_in_the_lower_precision() -> None:
    for dtype, difference in run_ranks(run_autocast, 2):
        assert dtype == torch.bfloat16
        assert difference < 0.05
