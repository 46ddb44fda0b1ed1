"""Bytes as token ids: ids 0 to 255 are the bytes of a text in UTF-8, and 256 ends a document.
Imports nothing.

This tokenizer is named `config.tokenizer.BYTES`.
"""

SEPARATOR = 256
"""Token after each document."""

VOCAB_SIZE = 257
