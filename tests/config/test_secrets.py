"""Keys and passwords are refused in a configuration, and the message does not repeat them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_3d.config.secrets import check_secrets
from lightning_3d.errors import ConfigError
from lightning_3d.runs.check import check_shapes


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
    ],
)
def test_f22_secrets_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="looks like a secret|has a password in its URL") as refused:
        check_secrets(config)
    assert "s3cr3t" not in str(refused.value)


def test_words_of_a_vocabulary_and_plain_urls_are_none() -> None:
    check_secrets(
        {
            "model": {"config": {"eos_token": "</s>", "token": "x"}},
            "data": {"pad_token": "<pad>", "path": "s3://bucket/a:b@c"},
            "callbacks": {"metrics": {"tokens": "all", "dirpath": "s3://bucket:9000/runs"}},
            "logger": {"mine": {"api_key": None}},
        }
    )
    check_shapes([])


def test_f22_a_secret_on_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="logger.comet.api_key looks like a secret"):
        check_shapes(["logger=comet", "+logger.comet.api_key=abc"])
