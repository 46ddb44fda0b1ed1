"""Reads the pieces of a remote file in a process of its own. Imports no torch, so that such a
process starts at once."""

import random
import time
from pathlib import Path

from lightning_3d.storage.piece_cache import CachedFile


def read_all(file: CachedFile, seed: int, answers: Path, seconds: float = 0) -> None:
    """Read the first eight pieces twice, or pieces in a random order for some time, and compare
    them with the file on the disk."""
    contents, size = answers.read_bytes(), file.cache.piece
    numbers, end, done = random.Random(seed), time.monotonic() + seconds, 0
    while done < 16 or time.monotonic() < end:
        number = numbers.randrange(file.size // size) if seconds else (done + seed) % 8
        assert file.piece(number) == contents[number * size : (number + 1) * size]
        done += 1
