"""Tasks of lm-eval in a folder, of each kind of request, with a tiny Llama and a tokenizer of
words. Nothing needs a network."""

import json
import random
from pathlib import Path

POSITIONS, NEW_TOKENS = 64, 12
NAMES = ("tiny_choice", "tiny_long", "tiny_text")
WORDS = ["[unknown]", "[begin]", "[end]", *(f"w{index}" for index in range(40))]
STOP = "w9"

_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
{body}
"""
_BODIES = {
    "tiny_choice": (
        "multiple_choice",
        (
            "doc_to_text: '{{question}}'\ndoc_to_choice: '{{answers}}'\ndoc_to_target:"
            " '{{right}}'\nmetric_list: [{metric: acc}, {metric: acc_norm}]"
        ),
    ),
    "tiny_long": (
        "loglikelihood_rolling",
        "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: word_perplexity}]",
    ),
    "tiny_text": (
        "generate_until",
        (
            "doc_to_text: '{{question}}'\ndoc_to_target: '{{answers[0]}}'\nmetric_list:"
            f" [{{metric: exact_match}}]\ngeneration_kwargs: {{until: ['{STOP}'], max_gen_toks:"
            f" {NEW_TOKENS}}}"
        ),
    ),
}


def a_model(folder: Path) -> Path:
    """A model folder of Transformers with a tokenizer that puts [begin] first."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=WORDS[0])
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single=f"{WORDS[1]} $A", special_tokens=[(WORDS[1], 1)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=WORDS[0], bos_token=WORDS[1], eos_token=WORDS[2]
    )
    made.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    more = {
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, **more))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def tasks(folder: Path) -> Path:
    """Short texts, and such that are longer than the model takes."""
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choice(WORDS[3:]) for _ in range(draw.randint(least, most)))

    questions = [
        "",
        f"{WORDS[1]} w1 w2",
        *(text(1, 20) for _ in range(6)),
        text(90, 90),
        text(64, 64),
    ]
    asked = [
        {
            "question": question,
            "answers": [text(1, 3) for _ in range(3)],
            "right": draw.randrange(3),
        }
        for question in questions
    ]
    data = {
        "tiny_choice": asked,
        "tiny_long": [{"text": text(n, n)} for n in (3, 64, 65, 150, 20)],
        "tiny_text": asked[1:],
    }
    for name, rows in data.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        kind, body = _BODIES[name]
        (folder / f"{name}.yaml").write_text(
            _TASK.format(name=name, data=file, kind=kind, body=body)
        )
    return folder
