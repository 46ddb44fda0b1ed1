"""Tiny models that read images, their batches, and the plain loop on one process."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from reference import Run, one_thread
from torch import Tensor, nn

ROWS, STEPS, SEQUENCE, VOCABULARY = 8, 3, 24, 67
VIDEO, BEGIN, END, IMAGE = 63, 64, 65, 66  # special tokens
PATCHES = 16  # of an image, before four of them become one token
# a gradient of rounding errors, as one of Gemma 4's tower, must not move a weight
ADAMW = {"lr": 3e-4, "eps": 1e-4}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
}
QWEN_VISION = {
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN_ROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}


def llava() -> nn.Module:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision = VISION | {"model_type": "clip_vision_model", "patch_size": 8, "projection_dim": 32}
    config = LlavaConfig(
        vision_config=vision,
        text_config=TEXT | {"model_type": "llama"},
        image_token_id=IMAGE,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def gemma3() -> nn.Module:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    tokens = {"image_token_id": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END}
    config = Gemma3Config(
        vision_config=VISION | {"patch_size": 4}, text_config=text, mm_tokens_per_image=4, **tokens
    )
    return Gemma3ForConditionalGeneration(config)


def qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = QWEN_VISION | {"depth": 2, "embed_dim": 32, "mlp_ratio": 2, "in_channels": 3}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(vision_config=vision, text_config=TEXT | QWEN_ROPE, **QWEN_TOKENS)
    )


def qwen3_vl() -> nn.Module:
    """Features of the tower's layers are added after the first blocks of the language model, here
    after three of four."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = QWEN_VISION | {
        "depth": 3,
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "num_position_embeddings": PATCHES,
    }
    vision |= {"deepstack_visual_indexes": [0, 1, 2], "in_channels": 3}
    # so that the blocks, not the tower, have most of the parameters
    text = TEXT | QWEN_ROPE | {"intermediate_size": 256}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(vision_config=vision, text_config=text, **QWEN_TOKENS)
    )


def gemma4() -> nn.Module:
    """Each block gets embeddings of its own, and the last two of eight blocks the keys and values
    of the ones before."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    vision = VISION | {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 8,
    }
    text = TEXT | {
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "sliding_window": 8,
        "global_head_dim": 8,
    }
    text |= {
        "num_hidden_layers": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2,
    }
    tokens = {
        "image_token_id": IMAGE,
        "boi_token_id": BEGIN,
        "eoi_token_id": END,
        "video_token_id": VIDEO,
        "audio_token_id": 62,
    }
    del vision["image_size"]
    return Gemma4ForConditionalGeneration(
        Gemma4Config(vision_config=vision, audio_config=None, text_config=text, **tokens)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llava": llava,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
}


def initial_model(kind: str) -> nn.Module:
    """The same in every process. No weight keeps a zero or a one, behind which an error could
    hide."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def rows_of(kind: str) -> dict[str, Tensor]:
    """All rows of the run: an image of four tokens in each, then text."""
    generator = torch.Generator().manual_seed(2)
    count = ROWS * STEPS
    ids = 3 + (torch.rand((count, SEQUENCE), generator=generator).square() * (VIDEO - 3)).long()
    ids[:, 2], ids[:, 3:7], ids[:, 7] = BEGIN, IMAGE, END
    rows = {"input_ids": ids, "labels": ids.masked_fill(ids >= VIDEO, -100)}
    if kind == "gemma3":
        rows["token_type_ids"] = (ids == IMAGE).long()
    if kind == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(count, 1, 1)
        pixels = torch.rand((count, PATCHES, 3 * 4 * 4), generator=generator)
        return rows | {
            "pixel_values": pixels,
            "image_position_ids": places,
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    if not kind.startswith("qwen"):
        return rows | {"pixel_values": torch.randn((count, 3, 16, 16), generator=generator)}
    pixels = torch.randn((count, PATCHES, 3 * 2 * 4 * 4), generator=generator)
    grid = torch.tensor([1, 4, 4]).repeat(count, 1)
    return rows | {
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def loss_of(kind: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    # patches of all images, one after another
    if kind.startswith("qwen") and "pixel_values" in batch:
        batch = batch | {"pixel_values": batch["pixel_values"].flatten(0, 1)}
    return model(**batch).loss


class ImageModule(pl.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.model = kind, initial_model(kind)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.kind, self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAMW)


class TextFirst(ImageModule):
    """The first batch has no images."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if batch_idx == 0:
            batch = {key: value for key, value in batch.items() if key in ("input_ids", "labels")}
        return super().training_step(batch, batch_idx)


@one_thread()
def train_plain(kind: str, rounding: float = 0.0) -> Run:
    """The loop on one process, a global batch at a time. `rounding`: relative change of the initial
    weights."""
    model, rows = initial_model(kind), rows_of(kind)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters() if rounding else ():
            parameter.mul_(1 + rounding * torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(
            kind, model, {key: value[step * ROWS :][:ROWS] for key, value in rows.items()}
        )
        loss.backward()
        losses.append(loss.item())
        norms.append(
            nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            ).item()
        )
        optimizer.step()
        optimizer.zero_grad()
    return Run(
        losses,
        norms,
        {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()},
    )
