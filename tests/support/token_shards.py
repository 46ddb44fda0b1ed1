"""Folders of shards as `lightning-3d tokenize` writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_3d.app.training.data.shard_manifest import Manifest, TokenizerIdentity
from lightning_3d.app.training.data.tokenization.encoding import Encoded
from lightning_3d.app.training.data.tokenization.shard_writer import ShardPlace, ShardWriter

DOCUMENT = 1000
WORDS = TokenizerIdentity("words", 3000, 0, "a" * 64, "b" * 64)


def write_shards(
    folder: Path, documents: int, shard_tokens: int, identity: TokenizerIdentity = WORDS
) -> Path:
    """Random documents of `DOCUMENT` tokens."""
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(1, 3000, documents * DOCUMENT, dtype=np.uint16)
    tokens[DOCUMENT - 1 :: DOCUMENT] = 0
    writer = ShardWriter(folder, Manifest(False, "uint16", identity, {}), shard_tokens)
    writer.add(ShardPlace(), Encoded(tokens, np.full(documents, DOCUMENT)))
    writer.finish()
    Manifest(**{**writer.manifest.__dict__, "complete": True}).write(folder)
    return folder
