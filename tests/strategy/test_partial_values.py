"""What a step reads from a model besides its loss and logits, and what it gives it instead of
tokens: as on one process, or refused."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from parity import quiet_trainer
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.parallel.pipeline import Partial
from lightning_3d.strategy import Lightning3DStrategy

PLAN = {
    "tp": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "pp": {"embed": (["x"], ["h"]), "blocks": (["h"], ["h"]), "leave": (["h"], ["y"])},
}
VOCABULARY, WIDTH, LENGTH = 32, 16, 12
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
    "initializer_range": 0.2,
}


class Block(nn.Module):
    """Leaves the activations between its layers, a number of them, and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 32),
            nn.Linear(32, WIDTH),
        )
        self.inner: Any = None
        self.level = 0.0

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        self.scale = normed.pow(3).mean()
        self.inner = [torch.tanh(self.up(normed))]
        self.level = float(self.inner[0].detach().pow(2).sum())
        self.result = x + self.down(self.inner[0])
        return self.result


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.leave = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor | None = None, embedded: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(ids) if embedded is None else embedded
        for block in self.blocks:
            x = block(x)
        return {"logits": self.leave(x), "inner": self.blocks[-1].inner}


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def read(kind: str, network: Any, output: Any) -> Any:
    """The term that a step adds to the loss."""
    last = getattr(network, "blocks", [None])[-1]
    if kind in ("inner", "level", "scale", "result"):
        found = getattr(last, kind)
        return (
            1e-3 * found
            if kind in ("level", "scale")
            else 0.1 * (found[0] if kind == "inner" else found).pow(2).mean()
        )
    if kind == "returned":
        return 0.1 * output["inner"][0].pow(2).mean()
    if kind.startswith("hidden"):
        return output.hidden_states[int(kind.removeprefix("hidden"))].pow(2).mean() * 0.5
    return output.attentions[0].pow(2).sum() if kind == "attentions" else 0.0


class Reader(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.losses = kind, []  # type: ignore[var-annotated]
        self.of_library = kind.startswith(("hidden", "attentions", "prompt", "embedded"))
        self.network = LlamaForCausalLM(LlamaConfig(**SIZE)) if self.of_library else Network()
        if kind == "prompt":
            self.prompt = nn.Parameter(torch.randn(4, WIDTH) * 0.1)
        self.double()

    def training_step(self, ids: Tensor, _: int) -> Any:
        if self.of_library:
            return self.step_of_library(ids)
        output = (
            self.network(embedded=self.network.embed(ids))
            if self.kind == "own embedded"
            else self.network(ids)
        )
        return cross_entropy(output["logits"], ids) + read(self.kind, self.network, output)

    def step_of_library(self, ids: Tensor) -> Any:
        more = {
            "output_hidden_states": self.kind.startswith("hidden"),
            "output_attentions": self.kind == "attentions",
        }
        if not self.kind.startswith(("prompt", "embedded")):
            output = self.network(
                input_ids=ids, labels=ids, **{key: True for key, value in more.items() if value}
            )
            return output.loss + read(self.kind, self.network, output)
        embedded, labels = self.network.get_input_embeddings()(ids) * 1.1, ids
        if self.kind == "prompt":
            embedded = torch.cat([self.prompt.expand(len(ids), -1, -1), embedded], 1)
            labels = torch.cat([ids.new_full((len(ids), 4), -100), ids], 1)
        return self.network(inputs_embeds=embedded, labels=labels).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def slow_after(cases: list[Any], quick: int) -> list[Any]:
    return [
        *cases[:quick],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[quick:]),
    ]


def fit(kind: str, strategy: Any = "auto", devices: int = 1, dp: int = 1) -> list[float]:
    module = Reader(kind)
    ids: Any = torch.randint(
        0, VOCABULARY, (24, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_steps=3, precision="64-true")
    trainer.fit(module, DataLoader(ids, batch_size=8 // dp))
    return module.losses


def fit_kinds(
    layout: str, kinds: tuple[str, ...], cache: str, options: dict[str, Any]
) -> list[list[float]]:
    os.environ["XDG_CACHE_HOME"] = cache
    found = []
    for kind in kinds:
        plan = {} if Reader(kind).of_library else {"plan": PLAN}
        found.append(
            fit(
                kind, Lightning3DStrategy(layout, **plan, **options), 2, 2 if layout == "dp2" else 1
            )
        )
    return found


EXACT: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    (
        "tp2",
        {"sequence_parallel": False},
        ("scale", "result", "hidden2", "prompt", "embedded", "own embedded"),
    ),
    ("pp2", {}, ("inner", "scale", "hidden-1", "hidden3", "embedded")),
    ("dp2", {}, ("prompt", "embedded")),
    ("cp2", {}, ("prompt", "embedded")),
    ("tp2", {"sequence_parallel": True}, ("prompt", "embedded")),
    ("pp2", {"recompute": "full"}, ("result", "hidden-2", "embedded")),
]


@pytest.mark.parametrize(("layout", "options", "kinds"), slow_after(EXACT, 1), ids=str)
def test_what_every_rank_has_is_read_as_on_one_process(
    layout: str, options: dict[str, Any], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    for found in run_ranks(
        fit_kinds, 2, layout, kinds, str(tmp_path), options, process_group=False
    ):
        for kind, losses in zip(kinds, found, strict=True):
            assert losses == pytest.approx(fit(kind), rel=1e-6), kind


REFUSED = [
    ("tp2", "inner", r"'inner' of 'blocks\.3'"),
    ("pp2", "hidden1", r"entry 1 of 'hidden_states'"),
    ("tp2", "level", r"'level' of 'blocks\.3'"),
    ("tp2", "returned", r"'inner' of Network"),
    ("tp2", "attentions", "'attentions'"),
    ("pp2", "prompt", "'prompt'"),
]


@pytest.mark.parametrize(("layout", "kind", "names"), slow_after(REFUSED, 1))
def test_what_a_rank_has_a_part_of_is_refused_by_name(
    layout: str, kind: str, names: str, tmp_path: Path
) -> None:
    """Also where the self-check is remembered."""
    for _ in range(1 if kind == "hidden1" else 2):
        with pytest.raises((PlanError, ConfigError), match=names):
            run_ranks(fit_kinds, 2, layout, (kind,), str(tmp_path), {}, process_group=False)


def test_a_partial_value_may_be_passed_around_but_not_used() -> None:
    value = Partial("the output '1'", "Use dp2.")
    assert value is not None and "'1'" in f"{[value]}"
    uses: list[Any] = [
        lambda: value + 1,
        lambda: 2 * value,
        lambda: value.mean(),
        lambda: value[0],
        lambda: torch.cat([torch.ones(1), value]),
        lambda: float(value),
        lambda: list(value),
        lambda: bool(value),
    ]
    for use in uses:
        with pytest.raises(PlanError, match="Use dp2"):
            use()
