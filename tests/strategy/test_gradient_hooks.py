"""Parameters stay the objects that the user made, and hooks on their gradients get what they get on
one process."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from parity import Module, Part, Rows, assemble, assert_same_run, fit_on_rank, quiet_trainer
from ranks import RankDied, run_ranks
from reference import Recipe, Run, data, initial_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d.errors import ConfigError

RECIPE = Recipe(steps=3)
Hook = Callable[[Tensor], Tensor | None]


def _mask(gradient: Tensor) -> Tensor:
    keep = torch.zeros(models.vocabulary(RECIPE.model), 1)
    keep[-8:] = 1
    return gradient * keep


def _clip_norm(gradient: Tensor) -> Tensor:
    return gradient * (1e-3 / gradient.norm()).clamp(max=1)


def _clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def _halve(gradient: Tensor) -> None:
    gradient.mul_(0.5)


def _noise(gradient: Tensor) -> Tensor:
    return gradient + 1e-3 * torch.randn(gradient.shape, generator=torch.Generator().manual_seed(3))


def _later(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3).mul_(parameter.detach().abs().mean())


HOOKS: dict[str, Hook] = {
    "model.embed_tokens.weight": _mask,
    "model.layers.0.self_attn.q_proj.weight": _noise,
    "model.layers.1.self_attn.k_proj.weight": _clip_norm,
    "model.layers.2.mlp.down_proj.weight": _clamp,
    "model.layers.3.input_layernorm.weight": _halve,
    "lm_head.weight": _mask,
}
LATER = ("model.layers.3.mlp.up_proj.weight", "model.norm.weight")


class Hooked(Module):
    """The user's hooks, on parameters that it remembers by id; made where the model is."""

    def __init__(self, *, eager: bool) -> None:
        super().__init__(RECIPE)
        self.eager = eager
        if eager:
            self.make()

    def make(self) -> None:
        self.model = initial_model(RECIPE) if self.eager else self.fresh()
        self.calls = 0
        parameters = dict(self.model.named_parameters())
        self.model.lm_head.weight.mark = "kept"  # type: ignore[union-attr]
        for name, hook in HOOKS.items():
            parameters[name].register_hook(hook)
            parameters[name].register_hook(self.count)
        for name in LATER:
            parameters[name].register_post_accumulate_grad_hook(_later)
        self.noted = {id(parameter) for parameter in parameters.values()}

    def fresh(self) -> nn.Module:
        super().configure_model()
        assert self.model is not None
        return self.model

    def count(self, gradient: Tensor) -> None:
        self.calls += 1

    def configure_model(self) -> None:
        if self.model is None:
            self.make()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert all(id(parameter) in self.noted for parameter in self.parameters())
        assert self.model is not None
        head = dict(self.named_parameters()).get("model.lm_head.weight")
        assert head is None or vars(head)["mark"] == "kept"
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def one_process() -> Run:
    """Plain Lightning."""
    module, values, norms = Hooked(eager=True), [], []
    module.on_train_batch_end = lambda outputs, *_: values.append(float(outputs["loss"]))  # type: ignore[method-assign]
    module.on_before_optimizer_step = lambda _: norms.append(  # type: ignore[method-assign]
        float(
            torch.stack(
                [
                    parameter.grad.norm()
                    for parameter in module.parameters()
                    if parameter.grad is not None
                ]
            ).norm()
        )
    )
    loader = DataLoader(Rows(data(RECIPE)), batch_size=RECIPE.global_batch)
    quiet_trainer(devices=1, max_steps=RECIPE.steps, gradient_clip_val=RECIPE.clip).fit(
        module, loader
    )
    assert module.calls == RECIPE.steps * len(HOOKS)
    weights = {
        f"model.{name}": parameter.detach() for name, parameter in module.model.named_parameters()
    }  # type: ignore[union-attr]
    return Run(values, norms, weights)


def fit(**strategy: Any) -> Part:
    module = Hooked(eager=True)
    part = fit_on_rank(RECIPE, Rows(data(RECIPE)), module, micro_batch_size=2, **strategy)
    hooked = [name for name in HOOKS if f"model.{name}" in part.weights]
    assert module.calls == RECIPE.steps * len(hooked), "once a step"
    return part


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp2_pp2", {"schedule": "ZBVZeroBubble"}),
        ("tp2_dp2", {"zero_stage": 3}),
        ("tp4", {}),
        pytest.param("dp2", {"zero_stage": 1}, marks=FULL),
        pytest.param("dp2", {"zero_stage": 2, "zero_reduce": "micro_batch"}, marks=FULL),
        pytest.param("cp2", {}, marks=FULL),
        pytest.param("dp2", {"zero_stage": 1, "zero_overlap_gather": True}, marks=FULL),
        pytest.param("tp2_dp2", {"zero_stage": 2}, marks=FULL),
        pytest.param("pp2_dp2", {"zero_stage": 3}, marks=FULL),
        pytest.param("dp4", {"zero_stage": 3, "zero_shard_size": 2}, marks=FULL),
    ],
    ids=str,
)
def test_hooks_on_gradients_get_what_one_process_gives_them(
    layout: str, options: dict[str, Any]
) -> None:
    size = 1
    for part in layout.split("_"):
        size *= int(part[2:])
    assert_same_run(run_ranks(fit, size, layout=layout, **options, timeout=180), one_process())


class _Masked(Hooked):
    """Made on meta, with one hook that shows whether it was called."""

    def make(self) -> None:
        self.model = self.fresh()
        weight = self.model.model.embed_tokens.weight  # type: ignore[union-attr]
        weight.register_hook(_mask)
        self.noted = {id(parameter) for parameter in self.parameters()}
        self.model.lm_head.weight.mark = "kept"  # type: ignore[union-attr]

    def on_train_start(self) -> None:
        assert self.model is not None
        self.before = self.model.model.embed_tokens.weight.detach().clone()  # type: ignore[union-attr]


def moved_rows(**strategy: Any) -> tuple[Part, Tensor]:
    module = _Masked(eager=False)
    part = fit_on_rank(RECIPE, Rows(data(RECIPE)), module, micro_batch_size=2, **strategy)
    return part, module.before


def test_a_model_on_meta_keeps_its_parameters_and_their_hooks() -> None:
    found = run_ranks(moved_rows, 2, layout="tp2")
    weights, _ = assemble([part for part, _ in found])
    name = "model.model.embed_tokens.weight"
    for part, before in found:
        spec = part.specs[name]
        moved = torch.zeros(spec.global_shape)
        spec.paste((part.weights[name] - spec.cut(before)).abs(), moved)
        assert moved[:-8].max() == 0
    assert len(weights[name]) == models.vocabulary(RECIPE.model)


class _Refused(Hooked):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(eager=True)

    def make(self) -> None:
        self.model = initial_model(RECIPE)
        weight = self.model.model.norm.weight  # type: ignore[union-attr]
        self.noted = {id(parameter) for parameter in self.model.parameters()}
        self.model.lm_head.weight.mark = "kept"  # type: ignore[union-attr]
        if self.kind == "random":
            weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        elif self.kind == "shape":
            weight.register_hook(lambda gradient: gradient.sum())
        elif self.kind == "optimizer":
            weight.register_post_accumulate_grad_hook(self.step)
        elif self.kind == "accumulated":
            weight.register_hook(_halve)

    def on_fit_start(self) -> None:
        if self.kind == "one rank" and self.trainer.global_rank == 0:
            self.model.model.norm.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[union-attr]

    def on_train_batch_end(self, *_: Any) -> None:
        if self.kind == "late":
            self.model.model.norm.weight.register_hook(_halve)  # type: ignore[union-attr]

    @torch.no_grad()
    def step(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.sub_(parameter.grad)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [
            p
            for name, p in self.named_parameters()
            if self.kind != "untrained" or "norm" not in name
        ]
        if self.kind == "untrained":
            self.model.model.norm.weight.register_hook(_halve)  # type: ignore[union-attr]
        return torch.optim.SGD(parameters, lr=0.1)


KINDS = ("random", "shape", "optimizer", "accumulated", "late", "untrained")


def refusals(*kinds: str) -> dict[str, str]:
    found = {}
    for kind in kinds:
        try:
            accumulate = 2 if kind == "accumulated" else 1
            fit_on_rank(
                RECIPE,
                Rows(data(RECIPE)),
                _Refused(kind),
                layout="dp2",
                accumulate=accumulate,
                self_check="never",
            )
        except ConfigError as error:
            found[kind] = str(error)
    return found


def test_hooks_that_cannot_be_exact_are_refused() -> None:
    for found in run_ranks(refusals, 2, *KINDS, process_group=False, timeout=180):
        assert set(found) == set(KINDS)
        assert all("norm.weight" in message for message in found.values())


def test_a_hook_of_one_rank_alone_must_not_change_the_gradient() -> None:
    with pytest.raises(RankDied, match="exit code 2") as caught:
        run_ranks(refusals, 2, "one rank", process_group=False)
    assert "ranks [0]" not in str(caught.value), "rank 0 has the message"
