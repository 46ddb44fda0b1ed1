"""Keys and passwords are refused in a configuration, and the message does not repeat them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_3d.app.cli.main import main
from lightning_3d.app.config.secrets import check_secrets, check_words
from lightning_3d.app.runs.check import check_shapes
from lightning_3d.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "config",
    [
        {"logger": {"comet": {"api_key": "s3cr3t"}}},
        {"logger": {"mine": {"deep": [{"AccessKey": "s3cr3t"}]}}},
        {"callbacks": {"hub": {"hf_token": "s3cr3t"}}},
        {"callbacks": {"hub": {"token": "s3cr3t"}}},
        {"trainer": {"extra": {"password": "s3cr3t"}}},
        {"data": {"path": "https://ann:s3cr3t@example.org/data"}},
        {"callbacks": {"checkpoint": {"dirpath": ["s3://key:s3cr3t@bucket/a"]}}},
        {"logger": {"mine": {"password": 5303713}}},
        {"data": {"hf_token": "s3cr3t"}},
        {"data": {"path": "https://s3cr3t@github.com/ann/data"}},
        {"logger": {"mine": {"url": "redis://:s3cr3t@host:6379"}}},
        {"logger": {"mine": {"url": "redis://:s3cr3t/with/slashes@host"}}},
        {"data": {"path": "https://account.blob.core.windows.net/a?sv=2024&sig=s3cr3t%3D"}},
        {"data": {"path": "https://bucket.s3.amazonaws.com/a?X-Amz-Date=1&X-Amz-Signature=s3cr3t"}},
        {"logger": {"mine": {"headers": ["X-Mine", "s3cr3t"]}}},
        {"logger": {"mine": {"headers": {"X-Mine": "s3cr3t"}}}},
        {"logger": {"mine": {"options": ["Authorization: s3cr3t"]}}},
        {"logger": {"mine": {"authorization": "s3cr3t"}}},
        {"logger": {"mine": {"line": "Bearer s3cr3t-s3cr3t"}}},
        {"logger": {"mine": {"connection": "host=a;password=s3cr3t"}}},
        {"logger": {"mine": {"auth": ["ann", "s3cr3t"]}}},
        {"callbacks": {"mine": {"ssh_passphrase": "s3cr3t"}}},
        {"callbacks": {"mine": {"key": "s3cr3t9Xk2LmQ8vT4w"}}},
        {"callbacks": {"mine": {"note": "ghp_s3cr3t9Xk2LmQ8vT4wabcdefghijklmnop"}}},
        {"callbacks": {"mine": {"WANDB_TOKEN": "s3cr3t"}}},
        {"callbacks": {"mine": {"apiKey": b"s3cr3t"}}},
        {"hydra": {"job": {"env_set": {"WANDB_API_KEY": "s3cr3t"}}}},
    ],
    ids=repr,
)
def test_f22_secrets_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="looks like a secret|has a password in its URL"
    ) as refused:
        check_secrets(config)
    assert "s3cr3t" not in str(refused.value) and "5303713" not in str(refused.value)


def test_words_of_a_vocabulary_and_plain_urls_are_none() -> None:
    check_secrets(
        {
            "model": {"config": {"eos_token": "</s>", "token": "x"}},
            "data": {"pad_token": "<pad>", "path": "s3://bucket/a:b@c"},
            "logger": {
                "mine": {
                    "api_key": None,
                    "use_token": True,
                    "experiment_key": "a" * 32,
                    "url": "https://host:8080/a@b",
                }
            },
            "callbacks": {
                "mine": {"key": "val_loss", "tokens_seen": 5},
                "checkpoint": {"dirpath": "s3://bucket:9000/runs"},
            },
            "optimizer": {
                "key_padding": 3,
                "max_tokens": 5,
                "tokens_per_second": 1.0,
                "pad_token_id": 0,
            },
            "trainer": {
                "tokenizer": "/models/a",
                "bypass": 1,
                "monitor": "val/token",
                "eos_token": "</s>",
                "path": "abfs://box@account/a",
            },
        }
    )
    check_shapes([])


def test_no_example_is_refused() -> None:
    """Neither files of `conf/` and `recipes/`, nor command lines of the documentation."""
    for folder in ("conf", "recipes"):
        for file in sorted((ROOT / folder).rglob("*.yaml")):
            check_secrets({"file": yaml.safe_load(file.read_text())})
    lines = [
        line
        for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md")
        for line in page.read_text().splitlines()
    ]
    words = {
        word
        for line in lines
        for word in re.findall(r"(?<![\w.])[+]{0,2}[\w.]+=[^\s`'\"|)]+", line)
    }
    assert len(words) > 200
    for word in sorted(words):
        key, _, value = word.lstrip("+").partition("=")
        # options of `launch` are no part of the configuration of a run
        if not key.startswith("launch."):
            check_secrets({key: value})


def test_f22_a_secret_that_a_later_word_overrides_is_refused() -> None:
    """A run saves all words of its command line."""
    for words in (
        ["+logger.x.api_key=s3cr3t", "logger.x.api_key=null"],
        ["+logger.x={api_key: s3cr3t}"],
        ["+logger.x.password=a,b"],
    ):
        with pytest.raises(ConfigError, match="looks like a secret"):
            check_words(["trainer.max_steps=3", *words])
    check_words(["trainer.max_steps=3", "optimizer.lr=1,2", "~logger", "parallelism=tp2"])


def test_f22_a_variable_of_the_run_is_no_place_for_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    assert (
        main(["train", "+hydra.job.env_set.WANDB_API_KEY=s3cr3t", "trainer.dry=true", folder]) == 2
    )
    said = capsys.readouterr().err
    assert (
        said.startswith("lightning_3d: hydra.job.env_set.WANDB_API_KEY looks like a secret.")
        and "s3cr3t" not in said
    )
    assert not list(tmp_path.iterdir())


def test_f22_a_secret_on_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="logger.comet.api_key looks like a secret"):
        check_shapes(["logger=comet", "+logger.comet.api_key=abc"])
