"""A tokenizer of a few words with a chat template, and files of conversations."""

import json
from pathlib import Path
from typing import Any

WORDS = [
    "[pad]",
    "[end]",
    "[begin]",
    "user",
    "assistant",
    ":",
    *(f"w{index}" for index in range(40)),
]
TEMPLATE = (
    "{{ '[begin] ' }}{% for m in messages %}{{ m.role + ' : ' + m.content + ' [end] ' }}{%"
    " endfor %}"
)
TEMPLATE += "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"


def a_tokenizer(folder: Path, template: str | None) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[pad]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="[end]", pad_token="[pad]", unk_token="[pad]"
    )
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)
