"""Batches that context parallelism must split with care: packed documents, padding, and few
tokens."""

from typing import Any

import parity
import torch
from models import IGNORE, SEQUENCE, Batch
from parity import Module, Rows, fit_on_rank
from reference import Recipe, data

from lightning_3d.layout import Layout

KINDS = ("ring", "ulysses")


def packed(recipe: Recipe) -> Batch:
    """Rows of several documents, some of which go over all ranks, given as position ids that begin
    anew."""
    batch = data(recipe)
    generator = torch.Generator().manual_seed(3)
    begins = torch.rand(batch["input_ids"].shape, generator=generator) < 0.2
    begins[::3] = False
    begins[::3, 13] = True
    begins[:, 0] = True
    places = torch.arange(SEQUENCE).expand_as(begins)
    return batch | {"position_ids": places - torch.where(begins, places, 0).cummax(1).values}


def padded(recipe: Recipe) -> Batch:
    """Some rows end early, others begin late."""
    batch = data(recipe)
    kept = torch.ones_like(batch["input_ids"])
    kept[1::4, 9:] = 0
    kept[2::4, :3] = 0
    return batch | {
        "attention_mask": kept,
        "labels": batch["labels"].masked_fill(kept == 0, IGNORE),
    }


def one_token_a_chunk(recipe: Recipe) -> Batch:
    """Eight tokens; documents whose positions go on where a rank's two chunks meet."""
    batch = {key: value[:, :8] for key, value in data(recipe).items()}
    places = torch.arange(8).expand_as(batch["input_ids"]).clone()
    places[:, 4:] += 1
    places[::2, 5:] = torch.arange(3)
    return batch | {"position_ids": places}


def twelve_tokens(recipe: Recipe) -> Batch:
    return {key: value[:, :12] for key, value in data(recipe).items()}


BATCHES = {"packed": packed, "padded": padded, "short": one_token_a_chunk, "twelve": twelve_tokens}


def train_batches(recipe: Recipe, batches: str, **strategy: Any) -> parity.Part:
    return fit_on_rank(recipe, Rows(BATCHES[batches](recipe)), Module(recipe), **strategy)


def world_size(layout: str) -> int:
    return Layout.parse(layout).world_size
