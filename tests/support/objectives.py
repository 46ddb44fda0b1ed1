"""Objectives whose step calls a model several times, as people write them, and a plain loop that
trains them on one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import torch
import torch.nn.functional as F
from parity import Module, Part, Rows, fit_on_rank
from reference import Recipe, Run, dealt, default_dtype, initial_model, split, train_on
from torch import Tensor, nn

# "float32" in the functions below: ZeRO trains no float64
RECIPE = Recipe(dtype="float64", steps=3)
LENGTHS = (models.SEQUENCE, models.SEQUENCE - 5)
Loss = Callable[[nn.Module, nn.Module, models.Batch], Tensor]


def log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    """Of each sequence, (rows,)."""
    logits = model(input_ids=ids).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


def dpo(model: nn.Module, reference: nn.Module, batch: models.Batch) -> Tensor:
    """arXiv:2305.18290, equation 7."""
    with torch.no_grad():
        before = log_probabilities(reference, batch["chosen"]) - log_probabilities(
            reference, batch["rejected"]
        )
    chosen = log_probabilities(model, batch["chosen"])
    rejected = log_probabilities(model, batch["rejected"])
    return -F.logsigmoid(0.1 * (chosen - rejected - before)).mean()


def distillation(model: nn.Module, teacher: nn.Module, batch: models.Batch) -> Tensor:
    """Cross-entropy, and the divergence from the teacher, which is called after the student."""
    ids = batch["chosen"]
    logits = model(input_ids=ids).logits[:, :-1]
    with torch.no_grad():
        wanted = teacher(input_ids=ids).logits[:, :-1].log_softmax(-1)
    found = logits.log_softmax(-1).flatten(0, 1)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + F.kl_div(
        found, wanted.flatten(0, 1), log_target=True, reduction="batchmean"
    )


def contrastive(model: nn.Module, _: nn.Module, batch: models.Batch) -> Tensor:
    """Two views of each row attract each other, all others of the micro-batch repel; a third,
    frozen call shifts both."""
    first = model(input_ids=batch["chosen"]).logits.mean(1)
    with torch.no_grad():
        shift = model(input_ids=batch["chosen"].flip(1)).logits.mean(1)
    second = model(input_ids=batch["rejected"]).logits.mean(1)
    scores = F.normalize(first - shift, dim=-1) @ F.normalize(second - shift, dim=-1).T / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def features(model: nn.Module, teacher: nn.Module, batch: models.Batch) -> Tensor:
    """The loss of `distillation`, with weights of rows from the hidden states that the teacher
    returns."""
    ids = batch["chosen"]
    with torch.no_grad():
        seen = teacher(input_ids=ids, output_hidden_states=True)
        weights = torch.stack(seen.hidden_states).square().mean((0, 2, 3))
        wanted = seen.logits[:, :-1].log_softmax(-1)
    logits = model(input_ids=ids).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
    return (weights * losses).mean() + F.kl_div(
        logits.log_softmax(-1), wanted, log_target=True, reduction="none"
    ).sum(-1).mean()


def in_parts(model: nn.Module, teacher: nn.Module, batch: models.Batch) -> Tensor:
    """The loss of `distillation`, with calls of the teacher that context-parallel ranks cannot
    split: of a part of it, of another length, and for the last token alone."""
    ids, others = batch["chosen"], batch["rejected"]
    with torch.no_grad():
        hidden = teacher.model(input_ids=ids).last_hidden_state  # type: ignore[operator, union-attr]
        weight = hidden.square().mean() + teacher(input_ids=others).logits.square().mean()
        weight = weight + teacher(input_ids=ids, logits_to_keep=1).logits.square().mean()
    return weight * distillation(model, teacher, batch)


TEACHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "distillation": ("Llama", {}),
    "in_parts": ("Llama", {}),
    "qwen3": (
        "Qwen3",
        {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "num_hidden_layers": 5},
    ),
    "gpt_neox": (
        "GPTNeoX",
        {"intermediate_size": 96, "num_hidden_layers": 2, "hidden_dropout": 0.0},
    ),
    "mixtral": (
        "Mixtral",
        {"num_key_value_heads": 2, "num_local_experts": 4, "num_hidden_layers": 2},
    ),
    "odd": (
        "Llama",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 48,
            "num_hidden_layers": 2,
        },
    ),
}
"""Kinds of distillation -> (class of the teacher in Transformers, its configuration on top of the
student's, of twice the width)."""
LOSSES: dict[str, Loss] = {"dpo": dpo, "distillation": distillation, "contrastive": contrastive}
LOSSES |= dict.fromkeys(set(TEACHERS) - {"distillation", "in_parts"}, features) | {
    "in_parts": in_parts
}


def other_model(kind: str, recipe: Recipe) -> nn.Module:
    """The frozen second model: the initial one, or a teacher of twice the width."""
    if kind not in TEACHERS:
        return initial_model(recipe).requires_grad_(False)
    import transformers

    prefix, more = TEACHERS[kind]
    student = initial_model(recipe).config
    fields = {
        key: value
        for key, value in student.to_dict().items()
        if key in models.COMMON or key in ("vocab_size", "num_hidden_layers")
    }
    fields |= {
        "hidden_size": 2 * student.hidden_size,
        "num_key_value_heads": student.num_key_value_heads,
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng(devices=()), default_dtype(recipe.torch_dtype):
        torch.manual_seed(1)
        config = getattr(transformers, f"{prefix}Config")(**fields | more)
        teacher = getattr(transformers, f"{prefix}ForCausalLM")(config)
    if recipe.torch_dtype == torch.float64:
        models.keep_double(teacher)
        teacher.config._experts_implementation = "eager"  # grouped matrix products know no float64
    return teacher.requires_grad_(False)


class Objective(Module):
    """A LightningModule with a trained model and, except for the contrastive loss, a frozen one."""

    def __init__(self, kind: str, recipe: Recipe) -> None:
        super().__init__(recipe, initial_model(recipe))
        self.kind = kind
        self.other = other_model(kind, recipe) if kind != "contrastive" else nn.Identity()

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        loss = LOSSES[self.kind](self.model, self.other, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        self.log("val_loss", LOSSES[self.kind](self.model, self.other, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=RECIPE.learning_rate, weight_decay=RECIPE.weight_decay)


def rows() -> models.Batch:
    """Pairs of sequences of two lengths."""
    generator = torch.Generator().manual_seed(1)
    vocabulary, count = models.vocabulary(RECIPE.model), RECIPE.steps * RECIPE.global_batch
    chosen, rejected = (
        models.tokens(count, length, 3, vocabulary, generator) for length in LENGTHS
    )
    return {"chosen": chosen, "rejected": rejected}


def declared(kind: str) -> dict[str, Any]:
    """Arguments of the strategy for losses of the rows of a micro-batch that are no means over
    them."""
    return (
        {"loss_reduction": "accumulate"}
        if LOSSES[kind] in (contrastive, features, in_parts)
        else {}
    )


def fit(kind: str, dtype: str, layout: str, micro_batch_size: int, **strategy: Any) -> Part:
    """Train on this rank. Keeps what belongs to the trained model."""
    return fit_and_count(kind, dtype, layout, micro_batch_size, **strategy)[0]


def fit_and_count(
    kind: str, dtype: str, layout: str, micro_batch_size: int, **strategy: Any
) -> tuple[Part, int]:
    """Train on this rank. Also returns the number of elements of the frozen model that were here
    during the fit."""
    recipe = replace(RECIPE, dtype=dtype)
    module = Objective(kind, recipe)
    part = fit_on_rank(
        recipe,
        Rows(rows()),
        module,
        layout=layout,
        micro_batch_size=micro_batch_size,
        **declared(kind),
        **strategy,
    )
    frozen = sum(value.numel() for name, value in part.weights.items() if name.startswith("other."))
    return (
        replace(
            part,
            weights={
                name: value for name, value in part.weights.items() if name.startswith("model.")
            },
        ),
        frozen,
    )


def resume(
    kind: str, dtype: str, layout: str, micro_batch_size: int, path: str, **strategy: Any
) -> Part:
    """Continue on this rank from a checkpoint, with a module whose frozen model has other
    values."""
    recipe = replace(RECIPE, dtype=dtype)
    module = Objective(kind, recipe)
    with torch.no_grad():
        for parameter in module.other.parameters():
            parameter.add_(1.0)
    strategy |= declared(kind)
    part = fit_on_rank(
        recipe,
        Rows(rows()),
        module,
        layout=layout,
        micro_batch_size=micro_batch_size,
        resume=path,
        **strategy,
    )
    return replace(
        part,
        weights={name: value for name, value in part.weights.items() if name.startswith("model.")},
    )


def one_process(kind: str, dtype: str, dp: int, micro_batch_size: int) -> Run:
    """Train on one process with the micro-batches of `dp` data-parallel ranks."""
    recipe = replace(RECIPE, dtype=dtype)
    data, loss, other = rows(), LOSSES[kind], other_model(kind, recipe)
    batches = [
        {key: value[start : start + RECIPE.global_batch] for key, value in data.items()}
        for start in starts()
    ]
    parts = [
        [micro for own in dealt(batch, dp) for micro in split(own, micro_batch_size)]
        for batch in batches
    ]
    return train_on(recipe, parts, step=lambda model, batch: loss(model, other, batch))


def starts() -> range:
    return range(0, RECIPE.steps * RECIPE.global_batch, RECIPE.global_batch)
