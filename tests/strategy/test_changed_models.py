"""What users add to a model, however they do it, is checked again, and trains as one process does
or not at all; trials leave no trace."""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hooked
import pytest
import torch
import torch.nn.functional as F
from hooked import llama
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_3d.engine.plan_draft.draft import draft_plan
from lightning_3d.engine.self_check import remembered
from lightning_3d.engine.self_check.model_copy import kinds_of
from lightning_3d.engine.self_check.remembered import identity, is_verified
from lightning_3d.layout import Layout
from lightning_3d.models.library_patches import replaced_functions
from lightning_3d.models.parallel_plan import Cut, ParallelPlan
from lightning_3d.parallel.tensor.style_trials import fit_styles
from lightning_3d.parallel.trials.tokens import treats_tokens_separately
from lightning_3d.parallel.undone import undone

LISTED = "torch 2.13.0, transformers 5.24.0"
"""Versions in verified.json."""

FACTOR = 1.0
TABLE = {"act": torch.tanh}


def helper(x: Tensor) -> Tensor:
    return x * FACTOR


def other_helper(x: Tensor) -> Tensor:
    return x + FACTOR


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act: Any = torch.tanh
        self._private = False
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, bias: float = 0.0) -> Tensor:
        return x + self.down(TABLE["act"](helper(self.act(self.up(x))))) * self.scale + bias


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def hook(module: nn.Module, args: Any, output: Any) -> None:
    """Changes nothing."""


def pre_hook(module: nn.Module, args: Any) -> None:
    """Changes nothing."""


def closure(number: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.tanh(x) * number


@contextmanager
def put(owner: Any, **values: Any) -> Iterator[None]:
    """Change attributes, or entries of a dictionary, for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in values.items():
            (
                patch.setitem(owner, key, value)
                if isinstance(owner, dict)
                else patch.setattr(owner, key, value)
            )
        yield


@contextmanager
def globally(register: Callable[..., Any], value: Any) -> Iterator[None]:
    handle = register(value)
    try:
        yield
    finally:
        handle.remove()


def set_on_blocks(**values: Any) -> Callable[[Network], Any]:
    def change(model: Network) -> Any:
        for block in model.blocks:
            for key, value in values.items():
                setattr(block, key, value)

    return change


def hooked_blocks(register: str, value: Any) -> Callable[[Network], Any]:
    return lambda model: [getattr(block, register)(value) for block in model.blocks]


CHANGES: dict[str, Callable[[Network], Any]] = {
    "function": set_on_blocks(act=torch.relu),
    "function of the user's": set_on_blocks(act=helper),
    "lambda": set_on_blocks(act=lambda x: x.tanh()),
    "private": set_on_blocks(_private=True),
    "partial": set_on_blocks(act=functools.partial(F.leaky_relu, negative_slope=0.1)),
    "other partial": set_on_blocks(act=functools.partial(F.leaky_relu, negative_slope=0.2)),
    "closure": set_on_blocks(act=closure(2)),
    "other cell": set_on_blocks(act=closure(3)),
    "buffer": lambda model: model.blocks[0].scale.fill_(2.0),
    "hook": hooked_blocks("register_forward_hook", hook),
    "pre-hook": hooked_blocks("register_forward_pre_hook", pre_hook),
    "backward hook": hooked_blocks("register_full_backward_hook", hook),
    "global hook": lambda model: globally(register_module_forward_hook, hook),
    "global pre-hook": lambda model: globally(register_module_forward_pre_hook, pre_hook),
    "forward of an instance": lambda model: setattr(
        model.blocks[0], "forward", types.MethodType(lambda self, x: x, model.blocks[0])
    ),
    "method of a class": lambda model: put(Block, forward=lambda self, x: x),
    "default argument": lambda model: put(Block.forward, __defaults__=(1.0,)),
    "helper": lambda model: put(globals(), helper=other_helper),
    "global": lambda model: put(globals(), FACTOR=2.0),
    "table": lambda model: put(TABLE, act=torch.relu),
    "function of a library": lambda model: put(F, linear=lambda x, w, b=None: x @ w.T),
    "method of a library's class": lambda model: put(
        nn.Linear, forward=lambda self, x: x @ self.weight.T
    ),
}


def key_of(change: Callable[[Network], Any] | None = None) -> str | None:
    model = Network()
    context = change(model) if change is not None else None
    plan = ParallelPlan({}, "blocks")
    if hasattr(context, "gen"):  # a change for a while
        with context:
            return identity(model, plan, Layout.parse("tp2"), [])
    return identity(model, plan, Layout.parse("tp2"), [])


def test_every_way_to_change_a_model_changes_the_key_of_its_check() -> None:
    keys = {name: key_of(change) for name, change in CHANGES.items()}
    unchanged = key_of()
    assert unchanged is not None and key_of() == unchanged
    assert [name for name, key in keys.items() if key in (unchanged, None)] == []
    assert len(set(keys.values())) == len(keys)


def test_what_cannot_be_described_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = key_of(set_on_blocks(act=iter([torch.tanh])))
    assert key is None
    remembered.remember(key, remembered.Findings(), "Network")
    assert remembered.recall(key) is None and not list(tmp_path.rglob("*.json"))


def test_blocks_with_other_code_are_other_kinds() -> None:
    model = Network()
    model.blocks[1].register_forward_hook(hook)
    assert kinds_of(list(model.blocks)) == [(0, 2), (1,)]
    model.blocks[0].act = torch.relu
    assert kinds_of(list(model.blocks)) == [(0,), (1,), (2,)]


def patched_rotation(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
    return q, k


def in_llama(change: str) -> Any:
    from transformers import activations
    from transformers.models.gemma import modeling_gemma
    from transformers.models.llama import modeling_llama

    return {
        "helper": lambda: put(modeling_llama, apply_rotary_pos_emb=patched_rotation),
        "helper that looks like the library's": lambda: put(
            modeling_llama,
            apply_rotary_pos_emb=functools.wraps(modeling_llama.apply_rotary_pos_emb)(
                patched_rotation
            ),
        ),
        "helper of another family": lambda: put(
            modeling_llama, rotate_half=modeling_gemma.apply_rotary_pos_emb
        ),
        "method": lambda: put(
            modeling_llama.LlamaAttention, forward=lambda self, x, **more: (x, None)
        ),
        "method of another family": lambda: put(
            modeling_llama.LlamaMLP, forward=modeling_gemma.GemmaRMSNorm.forward
        ),
        "activation": lambda: put(F, silu=F.relu),
        "activation of torch": lambda: put(F, gelu=torch.tanh),
        "matrix product": lambda: put(torch, matmul=lambda a, b: a @ b),
        "method of tensors": lambda: put(torch.Tensor, softmax=lambda self, dim: self),
        "table of activations": lambda: put(activations.ACT2FN, silu=Block),
        "global hook": lambda: globally(register_module_forward_hook, hook),
    }[change]()


IN_LLAMA = [
    *(
        "helper",
        "helper that looks like the library's",
        "helper of another family",
        "method",
        "method of another family",
        "activation",
    ),
    *(
        "activation of torch",
        "matrix product",
        "method of tensors",
        "table of activations",
        "global hook",
    ),
]

ON_LLAMA: dict[str, Callable[[Any], Any]] = {
    "hook": lambda model: model.model.layers[0].register_forward_hook(hook),
    "hook of a library": lambda model: model.model.embed_tokens.register_forward_hook(
        nn.Module.train
    ),
    "pre-hook": lambda model: model.model.norm.register_forward_pre_hook(pre_hook),
    "forward": lambda model: setattr(
        model.model.norm, "forward", types.MethodType(hooked.patched_norm, model.model.norm)
    ),
    "method": lambda model: setattr(model.model.layers[0].mlp, "act_fn", Tanh()),
    "function": lambda model: setattr(model.model.layers[0].mlp, "_extra", helper),
}


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


@pytest.mark.parametrize("change", IN_LLAMA)
def test_a_family_is_not_verified_while_somebody_replaces_its_library(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "versions", lambda: LISTED)
    model = llama()
    with in_llama(change):
        assert not is_verified(model, Layout(tp=2))
    assert is_verified(model, Layout(tp=2))


def test_a_registered_attention_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    monkeypatch.setattr(remembered, "versions", lambda: LISTED)
    model = llama()
    keys = []
    for function in (patched_rotation, helper):
        with put(AttentionInterface._global_mapping, mine=function):
            assert not is_verified(model, Layout(tp=2))
            keys.append(identity(model, ParallelPlan({}), Layout(tp=2), []))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("change", ON_LLAMA)
def test_a_family_with_code_of_the_users_own_is_not_verified(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "versions", lambda: LISTED)
    model = llama()
    ON_LLAMA[change](model)
    assert not is_verified(model, Layout(tp=2))


def test_families_as_they_are_stay_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    import models

    monkeypatch.setattr(remembered, "versions", lambda: LISTED)
    assert not replaced_functions()
    found = [
        family
        for family in ("llama", "qwen2", "qwen3", "mistral", "gpt_neox")
        if is_verified(models.build(family), Layout(tp=2))
    ]
    assert found == ["llama", "qwen2", "qwen3", "mistral", "gpt_neox"]


CHANGED = [
    (function, place)
    for function in (hooked.mean_of_tokens, hooked.by_position)
    for place in ("embedding", "norm", "block")
]
WAYS: list[Any] = [
    *CHANGED,
    (hooked.noise_by_length, "embedding"),
    (hooked.drawn_noise_by_length, "mlp"),
    "patched norm",
    (hooked.mean_of_tokens, "block", "late"),
]
RIGHT: list[Any] = [(hooked.doubled, "embedding"), (hooked.doubled, "block", "late")]


SEQUENCE_PARALLEL = pytest.param("tp2", {"sequence_parallel": True}, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("layout", "options"), [SEQUENCE_PARALLEL, ("cp2", {})], ids=["sequence", "cp2"]
)
def test_what_sees_a_part_of_the_tokens_trains_as_on_one_process_or_not(
    layout: str, options: dict[str, Any], tmp_path: Path
) -> None:
    found = run_ranks(
        hooked.fits, 2, [*RIGHT, *WAYS], layout, str(tmp_path), timeout=240, **options
    )[0]
    expected = [hooked.one_process(way) for way in [*RIGHT, *WAYS]]
    for way, losses, wanted in zip([*RIGHT, *WAYS], found, expected, strict=True):
        if isinstance(losses, str):
            assert way not in RIGHT and "Self-check" in losses, (way, losses)
        else:
            assert losses == pytest.approx(wanted, rel=1e-5), way
    assert isinstance(found[len(RIGHT) + CHANGED.index((hooked.mean_of_tokens, "block"))], str)


def test_a_check_that_passed_does_not_stand_for_another_activation(tmp_path: Path) -> None:
    found = run_ranks(
        hooked.crossed_fits,
        2,
        ["plain", "function", "private", "hook", "plain"],
        str(tmp_path),
        timeout=240,
    )[0]
    assert found[0] == found[-1] == "trained"
    assert all("does not reproduce the whole model" in text for text in found[1:-1])
    assert len(list(tmp_path.rglob("*.json"))) == 1


@pytest.mark.parametrize(
    "layout",
    [
        "tp2",
        pytest.param("tp2_pp2", marks=pytest.mark.slow),
        pytest.param("cp2", marks=pytest.mark.slow),
    ],
)
def test_hooks_have_seen_after_a_step_what_they_see_on_one_process(
    layout: str, tmp_path: Path
) -> None:
    """Each hook of the first block runs once for each micro-batch, on the ranks of its stage."""
    found = run_ranks(
        hooked.counted,
        Layout.parse(layout).world_size,
        layout,
        str(tmp_path),
        2,
        self_check="always",
        timeout=240,
    )
    assert found[0] == hooked.counted(None, str(tmp_path), 2)


class Counted(nn.Module):
    """An MLP whose code, and whose layers' hooks, write wherever they can."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.counter = hooked.Counter()
        for one in self.counter.hooks():
            self.down.register_forward_hook(one)

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        self.own = getattr(self, "own", 0) + 1
        return self.down(self.up(x).relu())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Counted()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def run_directly(model: Stack) -> None:
    with undone(model):
        model(torch.ones(2, 8))


TRIALS: dict[str, Callable[[Stack], Any]] = {
    "directly": run_directly,
    "plan": draft_plan,
    "styles": lambda model: fit_styles(
        model,
        ParallelPlan(
            {"layers.*.mlp.up": Cut("colwise"), "layers.*.mlp.down": Cut("rowwise")}, "layers"
        ),
        tp_size=2,
    ),
    "tokens": lambda model: treats_tokens_separately(model.layers[0].mlp, 8),
}


@pytest.mark.parametrize("trial", TRIALS)
def test_a_trial_leaves_no_trace(trial: str) -> None:
    hooked.COUNTS.clear()
    hooked.SEEN.clear()
    hooked.Counter.made = Counted.calls = 0
    model = Stack()
    before = torch.get_rng_state()
    TRIALS[trial](model)
    assert Counted.calls == 0
    for layer in model.layers:
        assert layer.mlp.counter.state() == [0, 0, 0, 0, 0, 0, 0.0, 0, True, 0, 0]
        assert not hasattr(layer.mlp, "own") and not hasattr(layer.mlp.down, "calls")
    assert torch.equal(torch.get_rng_state(), before)
