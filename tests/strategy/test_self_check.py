"""A model that is rewritten into another one is found before its first step: mistakes of newcomers,
each exact or one message."""

import copy
import importlib
import itertools
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import own_gpt
import pytest
import torch
from own_gpt import ATTENTION, GPT, MLP, PACKED, PIPELINE, PLAN, Fitted, one_process
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor, nn

from lightning_3d.engine.self_check import remembered
from lightning_3d.engine.self_check.check import _own_context
from lightning_3d.engine.self_check.model_copy import copy_without_values, kept_blocks, kinds_of
from lightning_3d.engine.self_check.remembered import Findings, identity, is_verified, recall
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.layout import Layout
from lightning_3d.models.parallel_plan import Cut, ParallelPlan
from lightning_3d.strategy import Lightning3DStrategy


def build(*arguments: Any, **options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(*arguments, **options)


def fit(
    model: nn.Module, layout: str, cache: Path, plan: dict[str, Any] | None = None, **options: Any
) -> Fitted:
    """Train on as many ranks; what rank 0 has."""
    return run_ranks(
        own_gpt.fit, Layout.parse(layout).world_size, model, layout, plan, str(cache), **options
    )[0]


def assert_exact(fitted: Fitted, model: nn.Module) -> None:
    assert fitted.losses == pytest.approx(one_process(model), rel=2e-6)


KINDS = [own_gpt.Attention, own_gpt.NamedHeads, own_gpt.SharedKeys]
ON_FOUR = [pytest.param(kind, "tp4", marks=pytest.mark.full) for kind in KINDS[:2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "layout"),
    [*by_default([*itertools.product(KINDS, ["tp2", "tp2_pp2"])], 1, 2, 4), *ON_FOUR],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_heads_are_counted_whatever_their_attribute_is_called(
    attention: type[nn.Module], layout: str, tmp_path: Path
) -> None:
    model = build(attention)
    fitted = fit(model, layout, tmp_path)
    assert_exact(fitted, model)
    assert (
        f"self-check of GPT: passed; {Layout.parse(layout).name} reproduces the whole model"
        in fitted.printed
    )


@pytest.mark.full
def test_fewer_key_heads_than_ranks_are_refused_by_name_until_the_plan_shares_them(
    tmp_path: Path,
) -> None:
    """Half a key head on each rank cannot be what the module computes."""
    with pytest.raises(
        PlanError,
        match=(
            r"'h.0.attn' \(SharedKeys\).*If k and v have fewer heads than there are tp"
            r" ranks.*shared=True"
        ),
    ):
        fit(build(own_gpt.SharedKeys), "tp4", tmp_path)
    shared = {f"h.*.attn.{name}": Cut("colwise", units=2, shared=True) for name in "kv"}
    model = build(own_gpt.SharedKeys)
    assert_exact(
        fit(model, "tp4", tmp_path, {"tp": ATTENTION | shared | MLP, "pp": PIPELINE}), model
    )


@pytest.mark.slow
def test_a_packed_projection_that_says_what_it_packs_is_exact(tmp_path: Path) -> None:
    model = build(own_gpt.Packed)
    assert_exact(fit(model, "tp2", tmp_path, {"tp": PACKED | MLP, "pp": PIPELINE}), model)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tied": True}, {"dropout": 0.1}], ids=["tied", "dropout"])
def test_tied_weights_and_dropout_are_no_difference(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = build(**options)
    fitted = fit(model, "tp2_pp2", tmp_path)
    assert "reproduces the whole model" in fitted.printed
    if "tied" in options:
        assert_exact(fitted, model)


def without(entries: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: style for name, style in entries.items() if name not in names}


MISTAKES: dict[str, tuple[type[nn.Module], str, dict[str, Any], str]] = {
    "wrong name": (
        own_gpt.Attention,
        "tp2",
        {"tp": {**ATTENTION, "h.*.upp": "colwise"}, "pp": PIPELINE},
        "h.*.upp|all the names",
    ),
    "half a pair": (
        own_gpt.Attention,
        "tp2",
        {"tp": ATTENTION | {"h.*.up": "colwise"}, "pp": PIPELINE},
        r"'h.\*.up' with the style 'colwise', but no 'rowwise' layer",
    ),
    "other half": (
        own_gpt.Attention,
        "tp2",
        {"tp": ATTENTION | {"h.*.down": "rowwise"}, "pp": PIPELINE},
        r"'h.\*.down' with the style 'rowwise', but no 'colwise'",
    ),
    "reversed pair": (
        own_gpt.Attention,
        "tp2",
        {"tp": ATTENTION | {"h.*.up": "rowwise", "h.*.down": "colwise"}, "pp": PIPELINE},
        "up .* runs before down",
    ),
    "a column forgotten": (
        own_gpt.Attention,
        "tp2",
        {"tp": without(ATTENTION, "h.*.attn.v") | MLP, "pp": PIPELINE},
        "q and k but not v",
    ),
    "missing parameter": (
        own_gpt.Attention,
        "pp2",
        {"tp": ATTENTION, "pp": without(PIPELINE, "wpe")},
        "'net.wpe.weight' is in no module",
    ),
    "fixed heads": (
        own_gpt.FixedHeads,
        "tp2",
        PLAN,
        r"'h.0.attn' \(FixedHeads\).*between q, k and v.*number of heads",
    ),
    "partial gradient": (
        own_gpt.NormedHeads,
        "tp2",
        PLAN,
        "'h.0.attn.norm' is replicated.*replicated_with_grad_allreduce",
    ),
    "packed by columns": (
        own_gpt.Packed,
        "tp2",
        {"tp": {"h.*.attn.c_attn": "colwise", "h.*.attn.proj": "rowwise"} | MLP, "pp": PIPELINE},
        r"'h.0.attn' \(Packed\).*packed_colwise",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(mistake: str, tmp_path: Path) -> None:
    attention, layout, plan, message = MISTAKES[mistake]
    with pytest.raises(PlanError, match=message):
        fit(build(attention), layout, tmp_path, plan)
    assert not list(tmp_path.rglob("*.json"))  # what failed is not remembered


def test_heads_that_no_rank_can_count_are_found_where_training_would_go_on(tmp_path: Path) -> None:
    """Without the check the fit ends well, with other losses."""
    model = build(own_gpt.NamedHeads)
    unchecked = fit(model, "tp2", tmp_path, self_check="never")
    assert unchecked.losses != pytest.approx(one_process(model), rel=1e-4)
    assert "self-check" not in unchecked.printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["highest", "high", "medium"])
def test_a_check_multiplies_in_float32_whatever_the_run_does(name: str) -> None:
    """TF32 has 10 bits: on GPUs, a whole product and its shards differ by 1e-3."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(name)
        set_before = [backend.fp32_precision for backend in backends]
        with pytest.raises(ZeroDivisionError), _own_context(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
            assert [backend.fp32_precision for backend in backends] == ["ieee", "ieee"]
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == name
        assert [backend.fp32_precision for backend in backends] == set_before
        # a script that sets backends, which may have no common name then
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with _own_context(torch.device("cpu")):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_check_is_remembered_with_what_it_found(tmp_path: Path) -> None:
    model = build(own_gpt.NamedHeads)
    first, second = fit(model, "tp2", tmp_path), fit(model, "tp2", tmp_path)
    assert "self-check" in first.printed
    assert "self-check" not in second.printed
    assert second.losses == first.losses
    assert "self-check" in fit(model, "tp2", tmp_path, self_check="always").printed
    other_plan = {"tp": {**PLAN["tp"], "wpe": "replicate"}, "pp": PIPELINE}
    assert "self-check" in fit(model, "tp2", tmp_path, other_plan).printed


@pytest.mark.full
def test_other_stages_are_checked_again(tmp_path: Path) -> None:
    model = build()
    printed = [
        "self-check" in fit(model, "pp2", tmp_path, stages=stages).printed
        for stages in (None, [1, 3], [1, 3], [2, 2])
    ]
    assert printed == [True, True, False, True]


def test_a_damaged_memory_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "lightning_3d" / "self_check" / "key.json"
    file.parent.mkdir(parents=True)
    for content in ("", "{}", '{"local_sizes": ["nh"]}', '{"local_sizes": {"nh": "two"}}'):
        file.write_text(content)
        assert recall("key") is None
    file.write_text('{"local_sizes": {"h.0.nh": 2}, "partial": [["output", "1"]]}')
    assert recall("key") == Findings({"h.0.nh": 2}, (("output", "1"),))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(
        ConfigError, match='self_check must be auto, always or never; got "sometimes"'
    ):
        Lightning3DStrategy("tp2", self_check="sometimes")


class Noting(own_gpt.Block):
    """The first block leaves a note for the ones behind it, which do without where there is
    none."""

    notes: dict[str, torch.Tensor]

    def __init__(self, notes: dict[str, torch.Tensor]) -> None:
        super().__init__(own_gpt.Attention, 0.0)
        self.notes = notes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.notes.get("first", 0.0)
        self.notes.setdefault("first", x)
        return super().forward(x)


class Handing(Noting):
    """The fourth block leaves a note for the fifth: what they do depends on their index."""

    def __init__(self, notes: dict[str, torch.Tensor], index: int) -> None:
        super().__init__(notes)
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.index == 3:
            self.notes["third"] = x
        return own_gpt.Block.forward(
            self, x + self.notes.pop("third", 0.0) if self.index == 4 else x
        )


class NotingGPT(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, torch.Tensor] = {}
        self.h = nn.ModuleList(Noting(self.notes) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.notes.clear()
        return super().forward(ids)


@pytest.mark.slow
def test_a_value_that_does_not_pass_through_the_stages_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(PlanError, match="With pp=1, the result is correct|outside of the block"):
        fit(NotingGPT(), "pp2", tmp_path)


@pytest.mark.slow
def test_a_value_that_one_block_in_the_middle_hands_to_the_next_is_found(tmp_path: Path) -> None:
    model = NotingGPT()
    model.h = nn.ModuleList(Handing(model.notes, index) for index in range(8))
    with pytest.raises(PlanError, match="With pp=1, the result is correct|outside of the block"):
        fit(model, "pp2", tmp_path)


class Global(own_gpt.Block):
    """The fourth block leaves its note where all blocks of a process find it."""

    note: torch.Tensor | None = None

    def __init__(self, index: int) -> None:
        super().__init__(own_gpt.Attention, 0.0)
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.index == 4 and Global.note is not None:
            x = x + Global.note
        Global.note = x if self.index == 3 else None
        return super().forward(x)


@pytest.mark.slow
def test_a_value_in_a_class_does_not_pass_between_the_stages_of_a_check(tmp_path: Path) -> None:
    model = build()
    model.h = nn.ModuleList(Global(index) for index in range(8))
    with pytest.raises(PlanError, match="With pp=1, the result is correct|outside of the block"):
        fit(model, "pp2", tmp_path)


class OnlyInTraining(Noting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else own_gpt.Block.forward(self, x)


@pytest.mark.slow
def test_what_a_model_does_in_training_alone_is_compared_too(tmp_path: Path) -> None:
    model = NotingGPT()
    model.h = nn.ModuleList(OnlyInTraining(model.notes) for _ in range(4))
    with pytest.raises(PlanError, match="With pp=1, the result is correct|outside of the block"):
        fit(model, "pp2", tmp_path)


class Scaled(GPT):
    """Takes a mask of fractions and a scalar as well."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.f(x * mask[..., None])) * scale


class GivesMask(own_gpt.Text):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (ids,) = batch
        logits = self.net(ids, mask=torch.full(ids.shape, 0.5), scale=torch.tensor(2.0))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.slow
def test_inputs_without_gradients_or_rows_are_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of a mask is spread over the ranks, and nobody reads it."""
    torch.manual_seed(0)
    model = Scaled()
    fitted = run_ranks(fit_with, 2, GivesMask, model, "tp2", cache=str(tmp_path))[0]
    assert "reproduces the whole model" in fitted.printed
    monkeypatch.setattr(own_gpt, "Text", GivesMask)
    assert_exact(fitted, model)


class Returning(GPT):
    """Returns its logits in a container, in an object or among other things."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, ids: torch.Tensor) -> Any:
        logits = super().forward(ids)
        return {
            "nested": {"out": {"logits": logits}},
            "listed": [[logits], ids],
            "object": SimpleNamespace(logits=logits),
        }[self.how]


class ReadsLogits(own_gpt.Text):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (ids,) = batch
        output = self.net(ids)
        logits = (
            output.logits
            if hasattr(output, "logits")
            else output[0][0]
            if isinstance(output, list)
            else output["out"]["logits"]
        )
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.slow
@pytest.mark.parametrize("how", by_default(["nested", "listed", "object"], 0))
def test_outputs_in_containers_are_compared(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    fitted = run_ranks(fit_with, 2, ReadsLogits, Returning(how), "tp2", cache=str(tmp_path))[0]
    assert "reproduces the whole model" in fitted.printed
    monkeypatch.setattr(own_gpt, "Text", ReadsLogits)
    torch.manual_seed(0)
    assert_exact(fitted, Returning(how))


class Restless(own_gpt.Block):
    """Drops and adds noise in evaluation mode too, and has an attribute that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(own_gpt.NamedHeads, 0.0)
        self.lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(super().forward(x), 0.1)
        return x + 0.1 * torch.randn_like(x)


def restless() -> GPT:
    model = build()
    model.h = nn.ModuleList(Restless() for _ in range(4))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(["tp2", "pp2"], 0))
def test_random_numbers_and_locks_are_no_difference(layout: str, tmp_path: Path) -> None:
    fitted = run_ranks(fit_made, 2, restless, layout, cache=str(tmp_path))[0]
    assert "reproduces the whole model" in fitted.printed


class CallsForward(own_gpt.Text):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (ids,) = batch
        return nn.functional.cross_entropy(
            self.net.forward(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )


@pytest.mark.slow
def test_a_step_that_never_calls_the_model_is_not_unchecked_in_silence(tmp_path: Path) -> None:
    """Without a call no hook runs: the number of heads stays that of the whole model, and other
    losses come out."""
    with pytest.raises(
        PlanError,
        match=(
            r"cannot run: .*model.forward.*sizes that 'h.0.attn' has on each rank.*Call the model"
            r" itself"
        ),
    ):
        run_ranks(fit_with, 2, CallsForward, build(own_gpt.NamedHeads), "tp2", cache=str(tmp_path))
    assert (
        "skipped: the step runs the layers"
        in run_ranks(fit_with, 2, CallsForward, build(), "pp2", cache=str(tmp_path))[0].printed
    )


def fit_with(step: type[own_gpt.Text], model: nn.Module, layout: str, cache: str) -> Fitted:
    before, own_gpt.Text = own_gpt.Text, step
    try:
        return own_gpt.fit(model, layout, cache=cache)
    finally:
        own_gpt.Text = before


def fit_made(make: Any, layout: str, cache: str) -> Fitted:
    own_gpt.copy = SimpleNamespace(deepcopy=lambda model: model)  # a lock has no copy
    try:
        return own_gpt.fit(make(), layout, cache=cache)
    finally:
        own_gpt.copy = copy


def test_what_a_class_inherits_uses_and_is_configured_with_is_part_of_its_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a check that passed would stand for a model that computes something else now."""
    text = (
        "from torch import nn\nSCALE = 1\nclass Base(nn.Module):\n    def forward(self, x):\n      "
        "  return x * SCALE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    seen = set()
    for number, changed in enumerate(
        (text, text.replace("SCALE = 1", "SCALE = 2"), text.replace("x * SCALE", "x + SCALE"))
    ):
        (tmp_path / f"base{number}.py").write_text(changed)
        base = importlib.import_module(f"base{number}").Base
        base.__module__, name = "base", base.__module__
        monkeypatch.setitem(sys.modules, "base", sys.modules[name])
        for heads in (2, 4):
            model = type("Own", (base,), {"__module__": __name__})()
            model.settings = SimpleNamespace(heads=heads)
            seen.add(identity(model, ParallelPlan({}), Layout.parse("tp2"), []))
    assert len(seen) == 6


def test_code_of_a_class_without_a_file_is_part_of_its_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a notebook, whose module has no file. The same code has the same identity in another
    process."""
    text = (
        "class Cell(nn.Module):\n    def forward(self, x):\n        return [SCALE * y for y in x]\n"
    )
    monkeypatch.setitem(sys.modules, "notebook", ModuleType("notebook"))
    found = []
    for code in (
        text,
        text,
        text.replace("SCALE * y", "SCALE + y"),
        text.replace("[SCALE", "[2 * SCALE"),
        text.replace("SCALE", "OTHER"),
    ):
        scope: dict[str, Any] = {"nn": nn, "__name__": "notebook"}
        exec(code, scope)
        found.append(identity(scope["Cell"](), ParallelPlan({}), Layout.parse("tp2"), []))
    assert found[0] == found[1] and len(set(found)) == 4


class TestBlocks:
    def test_blocks_that_differ_in_their_index_alone_are_one_kind(self) -> None:
        blocks = [own_gpt.Block(own_gpt.Attention, 0.0) for _ in range(6)]
        for index, block in enumerate(blocks):
            block.layer_idx, block.window = index + 1, 8 if index % 2 else 4
        assert kinds_of(blocks) == [(0, 2, 4), (1, 3, 5)]
        assert kept_blocks(kinds_of(blocks)) == ([0, 1, 4, 5], 2)

    def test_one_block_of_each_kind(self) -> None:
        blocks = [
            own_gpt.Block(own_gpt.Attention, 0.0),
            own_gpt.Block(own_gpt.Packed, 0.0),
            own_gpt.Block(own_gpt.Attention, 0.1),
        ]
        assert kept_blocks(kinds_of(copy.deepcopy(blocks))) == ([0, 1, 2], 1)


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes))


LISTED = "torch 2.13.0, transformers 5.24.0"
"""Versions in verified.json."""


def test_a_verified_family_is_checked_again_only_if_its_forward_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remembered, "versions", lambda: LISTED)
    model = tiny_llama()
    assert is_verified(model, Layout(tp=2, pp=2, cp=2))
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    assert not is_verified(model, Layout(tp=2))


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_version_that_is_not_listed_has_no_verified_family(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patch release may change a model as much as a minor one."""
    installed = dict(pair.split() for pair in LISTED.split(", "))
    monkeypatch.setattr(remembered, "version", lambda name: installed[name])
    assert is_verified(tiny_llama(), Layout(tp=2))
    installed[package] = installed[package].rpartition(".")[0] + ".99"
    assert not is_verified(tiny_llama(), Layout(tp=2))


def test_the_copy_of_a_replaced_forward_runs_the_copied_modules() -> None:
    model = tiny_llama()
    forward, original = model.forward, model.model.layers[0]
    model.forward = lambda row=None, **batch: forward(**batch)
    copied = copy_without_values(model)
    ran: list[nn.Module] = []
    for layer in (original, copied.get_submodule("model.layers.0")):
        layer.register_forward_pre_hook(lambda module, args: ran.append(module))
    copied.to_empty(device="cpu")(row=1, input_ids=torch.ones(1, 4, dtype=torch.long))
    assert ran == [copied.get_submodule("model.layers.0")]


@pytest.mark.slow
def test_an_evaluation_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'h.0.attn' \(FixedHeads\)"):
        run_ranks(own_gpt.validate, 2, build(own_gpt.FixedHeads), str(tmp_path))
    assert (
        "reproduces the whole model"
        in run_ranks(own_gpt.validate, 2, build(own_gpt.NamedHeads), str(tmp_path))[0]
    )


class Sharp(own_gpt.Block):
    """Makes a thousandth of what is rounding in float32."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + torch.sin(3e4 * self.down(nn.functional.gelu(self.up(self.n2(x)))))


def sharp(attention: type[nn.Module]) -> GPT:
    model = build(attention)
    model.h[3] = Sharp(attention, 0.0)
    return model


@pytest.mark.slow
def test_rounding_that_a_model_magnifies_is_no_difference(tmp_path: Path) -> None:
    """It is compared again in float64, in which a mistake is seen as well."""
    assert "reproduces the whole model" in fit(sharp(own_gpt.Attention), "tp2", tmp_path).printed
    with pytest.raises(PlanError, match="does not reproduce the whole model"):
        fit(sharp(own_gpt.NormedHeads), "tp2", tmp_path)
