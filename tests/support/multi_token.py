"""Multi-token prediction on one process, written with Transformers' own DeepSeek-V3 and its
`MtpLayer`, and what ranks are compared with.

Of the package, the reference uses only ``initialize``, for the same initial weights.
"""

import copy
import functools
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from models import keep_double
from parity import PRECISIONS, Data, Part, Rows, StepValues, quiet_trainer
from reference import Recipe, Run, default_dtype, initialize
from torch import Tensor, nn
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
    DeepseekV3RMSNorm,
)

from lightning_3d.app.training.module import CausalLM, transformers_config

LAYERS, DEPTHS, WEIGHT, VOCABULARY, SEQUENCE = 4, 2, 0.4, 61, 12
FIELDS: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def model_group(*, depths: int | None = DEPTHS, **fields: Any) -> dict[str, Any]:
    """The group `model` of a run."""
    group = {"name": "ahead", "attn_implementation": "sdpa", "config": FIELDS | fields}
    return group | {"mtp_layers": depths, "mtp_loss_weight": WEIGHT}


def recipe(dtype: str = "float64") -> Recipe:
    return Recipe(dtype=dtype, steps=3, global_batch=8, clip=0.3)


def rows(plan: Recipe, *, documents: bool = False) -> dict[str, Tensor]:
    """Token rows whose labels are ignored in some places: in the middle, at the end, and in one row
    everywhere but at one place.

    Args:
        documents: pack several documents into each row, kept apart as `data.document_mask` does.
    """
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(
        2, VOCABULARY, (plan.steps * plan.global_batch, SEQUENCE), generator=generator
    )
    labels = ids.clone()
    labels[::3, 4:6] = -100
    labels[1::4, -2:] = -100
    labels[2::8] = -100
    labels[2::8, 5] = ids[2::8, 5]
    batch = {"input_ids": ids, "labels": labels}
    if not documents:
        return batch
    begins = torch.rand(ids.shape, generator=generator) < 0.2
    begins[:, 0] = True
    places = torch.arange(SEQUENCE).expand_as(begins)
    labels[begins] = -100
    return batch | {"position_ids": places - torch.where(begins, places, 0).cummax(1).values}


class Trained(CausalLM):
    """The module of a run, with the optimizer of the reference."""

    recipe: Recipe

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            in_double(self.model, self.recipe)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.parameters(), lr=self.recipe.learning_rate, weight_decay=self.recipe.weight_decay
        )


def in_double(model: nn.Module, plan: Recipe) -> None:
    """Let a model of float64 compute in it throughout, see `models.keep_double`."""
    if plan.dtype == "float64":
        model.config._experts_implementation = "eager"
        keep_double(model)


def module_of(group: dict[str, Any], plan: Recipe) -> Trained:
    made = Trained(group)
    made.recipe = plan
    return made


class SaveAfterFirst(pl.Callback):
    """Saves after the first step, in the middle of the epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


def train_ahead(
    group: dict[str, Any],
    plan: Recipe,
    *,
    documents: bool = False,
    save: str | None = None,
    resume: str | None = None,
    **strategy: Any,
) -> tuple[Part, dict[str, float]]:
    """Train on ranks. Returns what `parity.fit_on_rank` does, and the last values that were logged.

    Args:
        documents: see `rows`.
        save: where the state after the first step is saved.
        resume: checkpoint with which training goes on.
    """
    from lightning_3d.strategy import Lightning3DStrategy

    made = Lightning3DStrategy(**strategy, seed=plan.seed)
    assert made.layout is not None
    values, module = StepValues(), module_of(group, plan)
    trainer = quiet_trainer(
        strategy=made,
        devices=made.layout.world_size,
        precision=PRECISIONS[plan.dtype],
        max_epochs=1,
        gradient_clip_val=plan.clip,
        callbacks=[values, *([SaveAfterFirst(save)] if save is not None else [])],
    )
    trainer.fit(
        module,
        datamodule=Data(Rows(rows(plan, documents=documents)), plan.global_batch // made.layout.dp),
        ckpt_path=resume,
    )
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Part(values.losses, values.grad_norms, weights, dict(made.specs)), logged


class Plain(nn.Module):
    """A plain DeepSeek-V3 with `MtpLayer`s behind it: equations 21 to 25 of arXiv:2412.19437."""

    def __init__(self, fields: dict[str, Any], depths: int) -> None:
        super().__init__()
        config = transformers_config(fields)
        config._attn_implementation = "sdpa"
        self.model = DeepseekV3ForCausalLM(config)
        ahead = copy.deepcopy(config)
        ahead.first_k_dense_replace = 0
        ahead._experts_implementation = config._experts_implementation = "eager"
        self.mtp = nn.ModuleList(
            MtpLayer(ahead, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, k) for k in range(depths)
        )

    def sums(self, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> list[Tensor]:
        """Sum of the cross-entropies of each depth, that of the model first.

        Args:
            positions: (rows, sequence), of tokens in their documents; None: a row is one document.
        """
        base, head, (rows_, length) = self.model.model, self.model.lm_head, ids.shape
        mask = None if positions is None else same_document(positions)
        positions = torch.arange(length)[None] if positions is None else positions
        embedded = base.embed_tokens(ids)
        hidden = base(input_ids=ids, position_ids=positions, attention_mask=mask).last_hidden_state
        rotary = base.rotary_emb(embedded, positions)
        found = [cross_entropies(head(hidden), labels, 1)]
        for depth, layer in enumerate(self.mtp, start=1):
            blank = torch.zeros(rows_, depth, embedded.shape[-1], dtype=embedded.dtype)
            shifted = torch.cat([embedded[:, depth:], blank], dim=1)
            hidden = layer(shifted, hidden, rotary, mask, positions, None)
            found.append(cross_entropies(head(hidden), labels, depth + 1))
        return found


def same_document(positions: Tensor) -> Tensor:
    """(rows, 1, sequence, sequence): whether a token sees another one, of its own document and not
    behind it."""
    documents = (positions == 0).cumsum(1)
    return (
        (documents[:, :, None] == documents[:, None, :])
        & torch.ones(positions.shape[1], positions.shape[1]).tril().bool()
    )[:, None]


def cross_entropies(logits: Tensor, labels: Tensor, distance: int) -> Tensor:
    """Sum over positions whose next ``distance`` tokens are all targets."""
    total = logits.new_zeros(())
    for row in range(len(labels)):
        for place in range(labels.shape[1] - distance):
            if (labels[row, place + 1 : place + 1 + distance] != -100).all():
                total = total - F.log_softmax(logits[row, place], -1)[labels[row, place + distance]]
    return total


def plain_name(name: str) -> str:
    """Name in `Plain` of a parameter of our model."""
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or int(parts[2]) < LAYERS:
        return f"model.{name}"
    rest = ".".join(parts[3:]).replace("shared_head.norm", "post_norm")
    inner = (
        rest
        if rest.split(".")[0] in ("enorm", "hnorm", "eh_proj", "post_norm")
        else f"mtp_block.{rest}"
    )
    return f"mtp.{int(parts[2]) - LAYERS}.{inner}"


def initial_weights(group: dict[str, Any], plan: Recipe) -> dict[str, Tensor]:
    """Initial values of parameters and saved buffers of our model, by our names."""
    module = module_of(group, plan)
    with default_dtype(plan.torch_dtype), torch.device("meta"):
        module.configure_model()
    module.to(plan.torch_dtype)
    initialize(module, plan.seed)
    return {
        name.removeprefix("model."): value.detach() for name, value in module.state_dict().items()
    }


def plain_model(group: dict[str, Any], plan: Recipe) -> Plain:
    """The reference with the initial weights of our model."""
    plain = Plain(group["config"], group["mtp_layers"]).to(plan.torch_dtype)
    values = initial_weights(group, plan)
    assert {plain_name(name) for name in values} == set(plain.state_dict())
    plain.load_state_dict({plain_name(name): value for name, value in values.items()})
    if plan.dtype == "float64":
        keep_double(plain)
    return plain.train()


def reference_run(
    group: dict[str, Any], plan: Recipe, *, documents: bool = False
) -> tuple[Run, list[list[float]]]:
    """Train on one process. Returns the run with our names, and the loss of each depth in each
    step."""
    plain = plain_model(group, plan)
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay
    )
    data, losses, norms, parts = rows(plan, documents=documents), [], [], []
    for start in range(0, plan.steps * plan.global_batch, plan.global_batch):
        ids, labels, positions = (
            data[key][start : start + plan.global_batch] if key in data else None
            for key in ("input_ids", "labels", "position_ids")
        )
        count = int((labels[:, 1:] != -100).sum())
        sums = [each / count for each in plain.sums(ids, labels, positions)]
        loss = sums[0] + WEIGHT * sum(sums[1:]) / len(sums[1:])
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), plan.clip).item())
        optimizer.step()
        losses.append(loss.item())
        parts.append([each.item() for each in sums])
    known = dict(plain.named_parameters())
    names = [name for name in initial_weights(group, plan) if plain_name(name) in known]
    return (
        Run(losses, norms, {f"model.{name}": known[plain_name(name)].detach() for name in names}),
        parts,
    )


@functools.cache
def expected(
    dtype: str = "float64", *, tied: bool = False, documents: bool = False
) -> tuple[Run, list[list[float]]]:
    return reference_run(model_group(tie_word_embeddings=tied), recipe(dtype), documents=documents)
