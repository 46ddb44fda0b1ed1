"""Recomputation, offload of activations and compilation of blocks: they change memory and speed,
never a number."""

import functools
import math
from collections import Counter
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from counting import recording
from memory import LiveBytes
from parity import (
    Module,
    Part,
    Rows,
    assert_same_run,
    assert_same_training,
    fit_on_rank,
    quiet_trainer,
)
from ranks import run_ranks
from reference import Recipe, data
from sweeps import by_default
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.parallel.pipeline.unknown import first_unknown
from lightning_3d.parallel.sequence_shards import SequenceShards

COMMON: list[dict[str, Any]] = [
    {"layout": "tp2_dp2", "recompute": "selective"},
    {"layout": "pp2_dp2", "recompute": "full", "recompute_every": 2, "offload_activations": True},
    {"layout": "dp2", "zero": 3, "recompute": "full"},
    {"layout": "tp2", "recompute": "selective", "recompute_keep": ["mm", "aten.addmm"]},
    {"layout": "pp2", "schedule": "ZBVZeroBubble", "recompute": "full"},
]
OTHERS: list[dict[str, Any]] = [
    {"layout": "tp2_pp2_dp2", "zero": 3, "recompute": "selective", "offload_activations": True},
    {"layout": "tp2_pp2_dp2", "zero": 2, "zero_reduce": "micro_batch", "recompute": "full"},
    {
        "layout": "pp2_dp2",
        "schedule": "DualPipeV",
        "zero": 3,
        "recompute": "full",
        "offload_activations": True,
    },
    {
        "layout": "pp2_dp2",
        "schedule": "Interleaved1F1B",
        "zero": 2,
        "recompute": "selective",
        "recompute_every": 2,
    },
    {"layout": "tp2", "recompute": "selective", "recompute_keep": ["bmm", "_softmax", "silu"]},
    *({"model": model, "layout": "tp2_pp2", "recompute": "full"} for model in models.MODELS),
    # The blocks of the plain model name no attention, so they cannot be recomputed selectively.
    *(
        {"model": model, "layout": "tp2_pp2", "recompute": "selective"}
        for model in models.MODELS
        if model != models.PLAIN
    ),
    {"layout": "tp2_pp2", "dtype": "float64", "recompute": "full"},
]


def _name(options: dict[str, Any]) -> str:
    return "-".join(str(key if value is True else value) for key, value in options.items())


@pytest.mark.parametrize("options", by_default(COMMON, 0, 1, 4), ids=_name)
def test_recomputation_is_exact(options: dict[str, Any]) -> None:
    assert_same_training(**options)


@pytest.mark.full
@pytest.mark.parametrize("options", OTHERS, ids=_name)
def test_recomputation_is_exact_everywhere(options: dict[str, Any]) -> None:
    assert_same_training(**options)


class Counting(Module):
    """Counts the calls of every attention and MLP."""

    def configure_model(self) -> None:
        super().configure_model()
        self.ran = {"self_attn": 0, "mlp": 0}
        for layer in self.model.model.layers:  # type: ignore[union-attr]
            for name in self.ran:
                getattr(layer, name).register_forward_pre_hook(
                    lambda _, args, name=name: self._count(name, args)
                )

    def _count(self, name: str, args: Any) -> None:
        if not first_unknown(args):  # hooks also see the places of modules of other stages
            self.ran[name] += 1


def count_calls(**strategy: Any) -> dict[str, int]:
    recipe = Recipe(steps=1)
    module = Counting(recipe)
    fit_on_rank(
        recipe, Rows(data(recipe)), module, **{"micro_batch_size": recipe.global_batch, **strategy}
    )
    return module.ran


@pytest.mark.parametrize(
    ("options", "attention", "mlp"),
    [
        ({}, 4, 4),
        ({"recompute": "full"}, 8, 8),
        ({"recompute": "full", "recompute_every": 3}, 6, 6),
    ],
    ids=["none", "full", "every third"],
)
def test_what_runs_twice(options: dict[str, Any], attention: int, mlp: int) -> None:
    [ran] = run_ranks(count_calls, 1, layout="tp1", **options)
    assert ran == {"self_attn": attention, "mlp": mlp}


@pytest.mark.slow
def test_a_split_backward_recomputes_a_block_once_for_all_of_its_weights() -> None:
    """The stages of a V are blocks 0 and 3, and 1 and 2. The first stage has no split backward; the
    others recompute for the gradients of inputs and of weights, and not for each weight."""
    micro_batches = 4
    rows = Recipe().global_batch // micro_batches
    # Without the proof of the loss, which runs the step once more.
    options = {
        "layout": "pp2",
        "schedule": "ZBVZeroBubble",
        "micro_batch_size": rows,
        "loss_reduction": "mean",
    }
    ends, middle = run_ranks(count_calls, 2, recompute="full", **options)
    assert ends == dict.fromkeys(("self_attn", "mlp"), micro_batches * (2 + 3))
    assert middle == dict.fromkeys(("self_attn", "mlp"), micro_batches * (3 + 3))


def kept_bytes(attention: str, **strategy: Any) -> int:
    """What each block leaves alive at the end of a forward, in bytes: measured on the way through
    the model."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(steps=2)
    marks: list[int] = []

    class Watched(Module):
        def configure_model(self) -> None:
            super().configure_model()
            self.model.config._attn_implementation = attention  # type: ignore[union-attr]
            self.layers = list(self.model.model.layers)  # type: ignore[union-attr]
            for layer in self.layers:
                layer.register_forward_pre_hook(lambda *_: marks.append(memory.now))

        def training_step(self, batch: Any, index: int) -> Tensor:
            with memory:
                return super().training_step(batch, index)

    memory = LiveBytes()
    trainer = quiet_trainer(strategy=Lightning3DStrategy("tp1", **strategy), devices=1, max_steps=2)
    trainer.fit(Watched(recipe), DataLoader(Rows(data(recipe)), batch_size=recipe.global_batch))
    # the second block in the second step, when all parameters were seen
    return marks[recipe.layers + 2] - marks[recipe.layers + 1]


@pytest.mark.slow
def test_memory_of_a_block() -> None:
    """A fully recomputed block keeps its input. A selective one keeps no attention scores."""
    recipe = Recipe()
    hidden, sequence, rows = models.COMMON["hidden_size"], models.SEQUENCE, recipe.global_batch
    heads = models.COMMON["num_attention_heads"]
    [everything], [selective], [full], [second] = (
        run_ranks(kept_bytes, 1, "eager", **options)
        for options in (
            {},
            {"recompute": "selective"},
            {"recompute": "full"},
            {"recompute": "full", "recompute_every": 2},
        )
    )
    inputs = rows * sequence * hidden * 4
    scores = rows * heads * sequence * sequence * 4
    assert full == inputs
    assert selective <= everything - scores
    assert selective > 4 * inputs
    assert second >= everything  # of two blocks the first is recomputed, this is the second


def count_sums(**strategy: Any) -> int:
    """All-reduces and reduce-scatters over the tensor-parallel ranks of one step with one
    micro-batch."""
    recipe = Recipe(steps=1)
    with recording() as recorder:
        fit_on_rank(
            recipe,
            Rows(data(recipe)),
            Module(recipe),
            micro_batch_size=recipe.global_batch,
            **strategy,
        )
    size = recipe.global_batch * models.SEQUENCE * models.COMMON["hidden_size"]
    return len(recorder.over((0, 1), "all_reduce", "reduce_scatter_tensor", numel=size))


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", by_default([False, True], 1))
def test_what_is_communicated_again(sequence_parallel: bool) -> None:
    """Two sums forward and two backward in each of four blocks, with embedding and head two more. A
    full recomputation repeats the sum after the attention; that at the end of a block it does not
    need."""
    tp2 = {"layout": "tp2", "sequence_parallel": sequence_parallel}
    plain, full = (
        run_ranks(count_sums, 2, **tp2, **options)[0] for options in ({}, {"recompute": "full"})
    )
    assert plain == 4 * 4 + 2
    assert full == plain + 4


class FunctionalSums(TorchDispatchMode):
    """Counts the sums that are really sent, not those whose kept result is taken."""

    sent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        sums = torch.ops._c10d_functional
        self.sent += func in (sums.all_reduce.default, sums.reduce_scatter_tensor.default)
        return func(*args, **(kwargs or {}))


def count_kept_sums(**strategy: Any) -> int:
    recipe = Recipe(steps=1)
    with FunctionalSums() as counted:
        fit_on_rank(
            recipe,
            Rows(data(recipe)),
            Module(recipe),
            micro_batch_size=recipe.global_batch,
            **strategy,
        )
    return counted.sent


@pytest.mark.parametrize("sequence_parallel", by_default([False, True], 1))
@pytest.mark.parametrize(("keep", "sums"), [(None, 8), (["mm"], 8)], ids=["expensive", "mm"])
def test_what_was_communicated_is_kept(
    keep: list[str] | None, sums: int, sequence_parallel: bool
) -> None:
    """Two sums in each of four blocks, once."""
    options = {
        "recompute": "selective",
        "recompute_keep": keep,
        "sequence_parallel": sequence_parallel,
    }
    counts = run_ranks(count_kept_sums, 2, layout="tp2", **options)
    assert counts == [sums, sums]


def count_all_sums(**strategy: Any) -> int:
    """Sums over the tensor-parallel ranks of one step, by functions of torch.distributed or by
    operators."""
    with FunctionalSums() as counted:
        return count_sums(**strategy) + counted.sent


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", by_default([False, True], 1))
def test_a_selection_sends_no_sum_twice(sequence_parallel: bool) -> None:
    options = {"layout": "tp2", "sequence_parallel": sequence_parallel}
    none, selective = (
        run_ranks(count_all_sums, 2, **options, recompute=word)[0] for word in ("none", "selective")
    )
    assert selective == none == 4 * 4 + 2


def dropped_run(**strategy: Any) -> Part:
    class Dropping(Module):
        def configure_model(self) -> None:
            with_dropout = models.COMMON | {"attention_dropout": 0.1}
            import transformers

            if self.model is None:
                config = transformers.LlamaConfig(
                    **with_dropout, num_hidden_layers=4, vocab_size=models.vocabulary("llama")
                )
                config._attn_implementation = "eager"
                self.model = transformers.LlamaForCausalLM(config)

    recipe = Recipe(steps=2)
    return fit_on_rank(recipe, Rows(data(recipe)), Dropping(recipe), **strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"recompute": "full"}, marks=pytest.mark.full),
        pytest.param({"recompute": "selective"}, marks=pytest.mark.full),
        {"recompute": "selective", "recompute_keep": ["mm", "native_dropout"]},
    ],
    ids=_name,
)
def test_the_same_dropout_is_drawn_again(options: dict[str, Any]) -> None:
    """With several micro-batches on their way through a pipeline, by tensor-parallel ranks that
    draw their own."""
    plain = run_ranks(dropped_run, 4, layout="tp2_pp2", micro_batch_size=4)
    again = run_ranks(dropped_run, 4, layout="tp2_pp2", micro_batch_size=4, **options)
    for part, other in zip(plain, again, strict=True):
        assert part.losses == pytest.approx(other.losses, rel=1e-6)
        assert part.grad_norms == pytest.approx(other.grad_norms, rel=1e-5)


def cached_run(**strategy: Any) -> Part:
    """A user who left the key-value cache on, with attention that notices keys too many."""

    class Caching(Module):
        def configure_model(self) -> None:
            super().configure_model()
            self.model.config._attn_implementation = "eager"  # type: ignore[union-attr]

        def training_step(self, batch: Any, index: int) -> Tensor:
            assert self.model is not None
            return self.model(**batch, use_cache=True).loss

    recipe = Recipe()
    return fit_on_rank(recipe, Rows(data(recipe)), Caching(recipe), **strategy)


def test_a_cache_is_not_filled_twice() -> None:
    from reference import reference

    parts = run_ranks(cached_run, 1, layout="tp1", micro_batch_size=4, recompute="full")
    assert_same_run(parts, reference(Recipe())[0])


def test_a_cache_by_position_is_not_filled_twice() -> None:
    """GPT-2 hands it to its blocks as their second argument."""
    import transformers

    from lightning_3d.models.parallel_plan import ParallelPlan
    from lightning_3d.parallel.blocks import find_blocks, process_blocks

    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, attn_implementation="eager"
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    process_blocks(find_blocks(model, ParallelPlan({})), BlockOptions(recompute="full"))
    model(input_ids=ids, labels=ids).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.slow
def test_a_cache_is_not_filled_twice_in_a_model_that_the_user_compiles() -> None:
    from lightning_3d.models.parallel_plan import ParallelPlan
    from lightning_3d.parallel.blocks import find_blocks, process_blocks

    model = models.build("llama", layers=2)
    model.config._attn_implementation = "eager"  # notices keys too many
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids, use_cache=True).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    process_blocks(find_blocks(model, ParallelPlan({})), BlockOptions(recompute="full"))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    compiled(input_ids=ids, labels=ids, use_cache=True).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Drawing(nn.Module):
    """Draws in a way that nobody would take for dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return _jittered(self.inner(x))


def _jittered(x: Tensor) -> Tensor:
    return x * torch.empty_like(x).uniform_(0.5, 1.5)


def test_whatever_is_drawn_is_drawn_again() -> None:
    from lightning_3d.parallel.blocks import process_blocks

    block, x = Drawing(), torch.randn(3, 4)
    gradients = []
    for recompute in ("none", "full"):
        block.zero_grad()
        torch.manual_seed(1)
        process_blocks([block], BlockOptions(recompute=recompute))
        block(x).square().sum().backward()
        gradients.append(block.inner.weight.grad)
    assert torch.equal(*gradients)


def test_a_filled_cache_is_refused() -> None:
    import transformers

    from lightning_3d.models.parallel_plan import ParallelPlan
    from lightning_3d.parallel.blocks import find_blocks, process_blocks

    model = models.build("llama", layers=2)
    ids = torch.ones(1, 4, dtype=torch.long)
    filled = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=filled)
    process_blocks(find_blocks(model, ParallelPlan({})), BlockOptions(recompute="full"))
    with pytest.raises(ConfigError, match="key-value cache that is not empty"):
        model(input_ids=ids, past_key_values=filled)


def compiled_run(backend: str, **strategy: Any) -> tuple[Part, dict[str, int], int]:
    """The run, the graph breaks, and how many graphs were compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        return counted_run(**strategy)


def counted_run(**strategy: Any) -> tuple[Part, dict[str, int], int]:
    from lightning_3d.compat import torch as torch_compat

    torch._dynamo.reset()
    before = torch_compat.compiled_graphs()
    broken = torch_compat.graph_breaks()
    recipe = Recipe()
    part = fit_on_rank(recipe, Rows(data(recipe)), Module(recipe), compile=True, **strategy)
    return part, dict(torch_compat.graph_breaks() - broken), torch_compat.compiled_graphs() - before


COMPILED: list[dict[str, Any]] = [
    {"layout": "tp2", "zero_stage": 1, "recompute": "selective"},
    {"layout": "cp2", "recompute": "selective"},
    {"layout": "tp2", "zero_stage": 1},
    {
        "layout": "tp2",
        "recompute": "selective",
        "recompute_keep": ["mm"],
        "sequence_parallel": False,
    },
    {"layout": "tp2_cp2", "recompute": "selective", "recompute_keep": ["mm"]},
    {"layout": "tp2_cp2", "cp_kind": "ulysses", "recompute": "selective"},
    {"layout": "pp2_cp2", "schedule": "ZBVZeroBubble", "zero_stage": 2},
    {"layout": "pp2_cp2", "cp_kind": "ulysses", "recompute": "full"},
    {"layout": "cp2_dp2", "zero_stage": 3, "offload_activations": True},
    {"layout": "dp2", "recompute": "selective"},
    {"layout": "dp2", "recompute": "selective", "recompute_keep": ["mm"]},
    {"layout": "pp2_dp2", "schedule": "ZBVZeroBubble", "zero_stage": 2},
    {"layout": "tp2_pp2", "zero_stage": 3, "recompute": "full"},
    {"layout": "tp2_pp2", "zero_stage": 1},
    {"layout": "tp2_pp2", "sequence_parallel": False},
    {"layout": "pp2_dp2", "zero_stage": 3, "offload_activations": True},
    {"layout": "dp2", "zero_stage": 2},
    {"layout": "tp2_pp2", "sequence_parallel": True, "zero_stage": 1},
    {"layout": "tp2", "sequence_parallel": True, "recompute": "selective"},
    {"layout": "tp2_pp2", "sequence_parallel": True, "schedule": "ZBVZeroBubble"},
    {"layout": "tp2_dp2", "sequence_parallel": True, "zero_stage": 3, "offload_activations": True},
    {"layout": "tp2_cp2", "sequence_parallel": True, "recompute": "full"},
    {"layout": "pp2", "schedule": "ZBVZeroBubble", "recompute": "full"},
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "backend"),
    by_default(
        [(options, backend) for options in COMPILED for backend in ("aot_eager", "inductor")], 0, 2
    ),
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
def test_compiled_blocks(options: dict[str, Any], backend: str) -> None:
    """Exact, one graph for all blocks of a rank, and no break in it. Inductor takes most of the
    time, so it runs in the long sweeps."""
    from reference import reference

    degrees = {part[:2]: int(part[2:]) for part in options["layout"].split("_")}
    results = run_ranks(
        compiled_run,
        math.prod(degrees.values()),
        backend=backend,
        micro_batch_size=2,
        timeout=500,
        **options,
    )
    assert_same_run([part for part, _, _ in results], reference(Recipe())[0])
    assert [breaks for _, breaks, _ in results] == [{}] * len(results)
    assert {graphs for _, _, graphs in results} == {1}


def operators_of_graphs(**options: Any) -> tuple[Counter[str], Counter[str]]:
    """The operators in the graph of the forward and in that of the backward."""
    graphs: list[Counter[str]] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(
            Counter(
                getattr(node.target, "__name__", "").split(".")[0] for node in graph.graph.nodes
            )
        )
        return make_boxed_func(graph.forward)

    with pytest.MonkeyPatch.context() as patch:
        backend = aot_autograd(
            fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
        )
        patch.setattr(
            torch, "compile", functools.partial(torch.compile, backend=backend, fullgraph=True)
        )
        torch._dynamo.reset()
        recipe = Recipe(steps=1)
        fit_on_rank(
            recipe,
            Rows(data(recipe)),
            Module(recipe),
            compile=True,
            micro_batch_size=recipe.global_batch,
            **options,
        )
    [forward, backward] = graphs
    return forward, backward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recomputed", "kept"),
    by_default(
        [
            ("tp2", ("cat", 2), {"all_reduce": (2, 2), "mm": (7, 14)}),
            ("cp2", ("silu", 1), {"mm": (7, 14), "context_attention": (1, 0)}),
        ],
        0,
    ),
)
def test_what_a_compiler_recomputes(
    layout: str, recomputed: tuple[str, int], kept: dict[str, tuple[int, int]]
) -> None:
    """Rotated heads and the activation of the MLP, but neither sums nor products with weights, each
    of which has two gradients, nor an attention that sends messages."""
    size = int(layout[2:])
    options = {"layout": layout, "sequence_parallel": False, "recompute": "selective"}
    for forward, backward in run_ranks(operators_of_graphs, size, **options):
        assert (forward[recomputed[0]], backward[recomputed[0]]) == (recomputed[1], recomputed[1])
        assert {name: (forward[name], backward[name]) for name in kept} == kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "again"), by_default([("none", 2), ("selective", 2), ("full", 0)], 0)
)
def test_a_compiler_gathers_inputs_again(recompute: str, again: int) -> None:
    """In the backward of a block, beside the two gathers of gradients: the inputs of attention and
    MLP, but no sums and no products. A block that is recomputed as a whole runs its forward again
    instead."""
    kept = {
        "reduce_scatter_tensor": (2, 2),
        "mm": (7, 14),
        "all_gather_into_tensor": (2, 2 + again),
    }
    for forward, backward in run_ranks(
        operators_of_graphs, 2, layout="tp2", sequence_parallel=True, recompute=recompute
    ):
        assert {name: (forward[name], backward[name]) for name in kept} == kept


class Broken(nn.Module):
    """A block that no graph can hold as one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        torch._dynamo.graph_break()
        return x + 1


class BrokenDropout(nn.Module):
    """Drops out in a block that no graph can hold as one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x * self.weight, 0.5, training=True)
        torch._dynamo.graph_break()
        return x + 0


def test_the_same_dropout_is_drawn_again_where_a_graph_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result is linear in the weight, so that it is the weight's product with the gradient if
    both dropped the same."""
    from lightning_3d.parallel.blocks import process_blocks

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    block = BrokenDropout()
    process_blocks(
        [block], BlockOptions(recompute="selective", recompute_keep=("mm",), compile=True)
    )
    result = block(torch.ones(64))
    result.sum().backward()
    assert 0 < (result == 0).sum() < 64
    assert torch.equal(block.weight.detach() * block.weight.grad, result)


@pytest.mark.parametrize("backend", by_default(["aot_eager", "inductor"], 0))
def test_graph_breaks_are_counted(
    backend: str, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    from lightning_3d.parallel.blocks import Compilation, process_blocks

    compilation = Compilation(torch.device("cpu"), "1F1B", 1)
    block = Broken()
    expected = block(torch.ones(2, 4))
    process_blocks([block], BlockOptions(compile=True))
    assert torch.allclose(block(torch.ones(2, 4)), expected)
    assert sum(compilation.graph_breaks.values()) >= 1  # Dynamo counts it in every frame around it
    compilation.warn()
    assert "because they have graph breaks" in str(recwarn.pop().message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "ful"}, 'Did you mean "full"'),
        ({"recompute": "full", "recompute_every": 0}, "at least 1"),
        ({"recompute_every": 2}, "needs recompute=full"),
        ({"recompute": "full", "recompute_keep": ("mm",)}, "needs recompute=selective"),
        ({"recompute": "selective", "recompute_keep": "mm"}, "must be a list; got"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockOptions(**options)


def test_what_a_second_trainer_asks_for_in_vain_is_named() -> None:
    made = BlockOptions(recompute="full")
    asked = BlockOptions(sequence_parallel=False)
    assert made.differences(asked, tp=2) == [
        "recompute=full, not none",
        "sequence_parallel=None, not False",
    ]
    assert made.differences(BlockOptions(recompute="full", sequence_parallel=False), tp=1) == []


def test_f18_what_cannot_work_is_refused() -> None:
    from lightning_3d.parallel.blocks import process_blocks
    from lightning_3d.strategy import Lightning3DStrategy

    with pytest.raises(
        LayoutError,
        match=(
            "recompute=selective needs one backward pass.*Use recompute=full, or the schedule 1F1B"
        ),
    ):
        Lightning3DStrategy("pp2", schedule="ZBVZeroBubble", recompute="selective")
    with pytest.raises(ConfigError, match="selective found nothing to recompute"):
        block = nn.Sequential(nn.Linear(2, 2))
        process_blocks([block], BlockOptions(recompute="selective"), exchanging=[block])
    with pytest.raises(ConfigError, match="no list of blocks"):
        process_blocks([], BlockOptions(compile=True))
    for name in ("softmaxx", "name"):
        with pytest.raises(ConfigError, match=f'operator "{name}", which ATen does not have'):
            process_blocks(
                [nn.Linear(2, 2)], BlockOptions(recompute="selective", recompute_keep=(name,))
            )
    with pytest.raises(ConfigError, match="updates its running statistics"):
        process_blocks([nn.Sequential(nn.BatchNorm1d(2))], BlockOptions(recompute="full"))


def test_offload_leaves_parameters_and_small_tensors() -> None:
    from lightning_3d.parallel.blocks.offload import MINIMUM_BYTES, SavedOnHost

    layer = nn.Linear(256, 256)
    # as many bytes as are offloaded
    x = torch.randn(MINIMUM_BYTES // 1024, 256, requires_grad=True)
    with SavedOnHost(layer):
        y = layer(x).relu()
    saved = y.grad_fn._saved_result  # type: ignore[union-attr]
    assert saved.data_ptr() != y.data_ptr()
    assert torch.equal(saved, y)
    small = torch.randn(2, 256, requires_grad=True)
    with SavedOnHost(layer):
        z = layer(small)
        products = z.grad_fn
    assert products._saved_mat1.data_ptr() == small.data_ptr()  # type: ignore[union-attr]
    assert layer.weight.data_ptr() in {saved.data_ptr() for saved in (products._saved_mat2,)}  # type: ignore[union-attr]


class _Ended:
    """An event of a GPU."""

    def synchronize(self) -> None:
        """Nothing runs."""


def test_host_memory_of_offload_is_used_again_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_3d.parallel.blocks import offload

    made: list[int] = []

    def memory(nbytes: int, *, page_locked: bool) -> torch.Tensor:
        assert page_locked
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(offload, "host_memory", memory)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    copies = offload._Copies(torch.device("cuda", 0))
    for _ in range(3):  # steps of two tensors
        taken = [copies.take(size) for size in (1000, 3000)]
        for each in taken:
            copies.give(each, _Ended())
    assert [1000 <= made[0] <= 1125, 3000 <= made[1] <= 3375, len(made)] == [True, True, 2]
    for size in range(1000, 200_000, 7000):  # other sizes in every step
        copies.give(copies.take(size), _Ended())
        assert copies._held <= 2 * copies._most and copies._used == 0
    assert all(nbytes <= offload._rounded(nbytes) <= 1.125 * nbytes for nbytes in range(1, 5000))


def test_a_block_of_an_earlier_call_is_recomputed_with_the_length_of_that_call() -> None:
    """The step calls the model with two lengths before the backward of either."""
    from lightning_3d.parallel.blocks import process_blocks

    shards, seen = SequenceShards(2), []

    class ReadsLength(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            seen.append((hidden.shape[1], shards.length))
            return torch.tanh(super().forward(hidden))

    block = ReadsLength(2, 2)
    process_blocks([block], BlockOptions(recompute="full"), shards.moment)
    outputs = []
    for shards.length in (4, 6):
        outputs.append(block(torch.randn(1, shards.length, 2)).sum())
    sum(outputs).backward()
    assert sorted(seen) == [(4, 4), (4, 4), (6, 6), (6, 6)]
    assert shards.length == 6
