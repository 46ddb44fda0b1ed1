"""Names that a terminal would obey are shown, not obeyed."""

from __future__ import annotations

import pickle

import pytest

from lightning_3d.app.cli.main import main
from lightning_3d.errors import ConfigError


@pytest.mark.parametrize("name", ["\x1b[2J\x1b]0;owned\x07", "a\rb", "\u202etxt.exe", "\x9b31m"])
def test_f22_messages_have_no_control_characters(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ConfigError(f"There is no {name}\n  here.")
    assert (
        str(error).isprintable() is False and set(str(error)) & set("\x1b\r\x07\u202e\x9b") == set()
    )
    assert str(error).count("\n") == 1 and str(pickle.loads(pickle.dumps(error))) == str(error)
    assert main(["inspect", f"/nowhere/{name}"]) == 2
    assert set(capsys.readouterr().err) & set("\x1b\r\x07\u202e\x9b") == set()
