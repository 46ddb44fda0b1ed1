"""Keys and passwords have no place in a configuration, which a run saves and sends to its loggers.
Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_3d.app.config.typed import leaves
from lightning_3d.errors import ConfigError

_SECRET_KEY = re.compile(
    r"(?i).*(api|access|private|account|storage|ssh|signing|encryption|client|auth)[_-]?key(s|_id)?|.*(secret|password|passwd|passphrase"
    r"|passcode|credential|authorization|api_?key).*|(.*[_-])?(pass|pwd|pw|cookies?|headers|bearer)|sas"
)
_TOKEN = re.compile(r"(?i)(.*[_-])?token|.*[a-z]Token")
_SECRET_TOKEN = re.compile(
    r"(?i)(.*[_-])?(hf|hub|api|auth|access|bearer|refresh|session|secret|user|login|git|github|gitlab|wandb|comet)_?token"
)
_WORD = re.compile(
    r"(?i)(.*[_-])?(eos|bos|pad|unk|mask|sep|cls|image|audio|video|special|start|end|stop|decoder|prompt|per|max|min|next|first|last)[_-]?token"
)
_GROUPS_WITH_TOKENS = ("model", "data")
"""Groups in which a token is a word of a vocabulary, unless its name says otherwise."""
_HOLDERS = re.compile(
    r"(?i)(.*_)?(headers|cookies|credentials?|secrets?|authorization|auth|passwords?|api_?keys)"
)
"""Names of lists and dicts of which everything is secret."""

_URL_WITH_SECRET = re.compile(
    r"(?ix) [a-z][a-z0-9+.-]*://[^\s/@:]*:(?!\d*/)[^\s@]*@"  # user:password@, :password@
    r"| \b(https?|wss?|ftps?)://[^\s/@]+@"  # a token instead of a user
    r"| [?&;\#](\w*(sig|signature|token|secret|password|passwd|pwd|credential|api_?key|accesskeyid|sas|auth)"  # noqa: E501
    r"  |x-(amz|goog)-(signature|credential|security-token)|key)=[^&\s]+"
    r"| hooks\.slack\.com/services/\S+"
)
_SECRET_TEXT = re.compile(
    # of known services
    r"(?x) \b(hf|gh[opsur]|sk|pk|rk|glpat|xox[abeprs]|npg|dop_v1|github_pat)[_-][A-Za-z0-9_-]{16,}"
    r"| \b(AKIA|ASIA)[A-Z0-9]{16}\b | \bAIza[\w-]{30,} | \beyJ[\w-]{8,}\.[\w-]{8,} | -----BEGIN["
    r" ][A-Z ]*PRIVATE"
    r"| (?i:\b(bearer|basic)\s+[\w.~+/=-]{8,})"
    r"| (?i:\b(authorization|x-api-key|api-?key|account_?key|shared_?access_?(key|signature)|password|passwd|pwd|secret)\s*[=:]\s*[^\s{$]+)"  # noqa: E501
)


def check_secrets(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that has a key, a token or a password in it. The message does not
    repeat it.

    Raises:
        ConfigError: with what to do instead.
    """
    for key, value in leaves(config):
        if value is None or isinstance(value, bool) or value == "":
            continue
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        if _URL_WITH_SECRET.search(text):
            raise ConfigError(
                f"{key} has a password in its URL, or a token. A run saves its configuration, so it"
                " would be readable in its folder. Leave it out of the URL, and give it to the"
                " library that opens the URL by an environment variable or a file of its own."
            )
        if _SECRET_TEXT.search(text) or _is_secret(key, text):
            raise ConfigError(
                f"{key} looks like a secret. A run saves its configuration, so it would be readable"
                " in its folder. Leave it out, and set the environment variable that the library"
                " reads, such as COMET_API_KEY, WANDB_API_KEY or HF_TOKEN."
            )


def check_words(overrides: Iterable[str]) -> None:
    """Refuse secrets in the words of a command line. A run saves all of them, also those that later
    ones override.

    Raises:
        ConfigError: as `check_secrets`.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value = (
            str(override.input_line).partition("=")[2]
            if override.is_sweep_override()
            else override.value()
        )
        check_secrets({override.get_key_element().lstrip("+~"): value})


def _is_secret(key: str, text: str) -> bool:
    """Check whether the name of a key says that its value is secret."""
    *holders, name = (re.sub(r"(\[\d+\])+$", "", part) for part in key.split("."))
    if any(
        _HOLDERS.fullmatch(holder) for holder in (*holders, *([name] if key.endswith("]") else []))
    ) or _SECRET_KEY.fullmatch(name):
        return True
    if name.lower() == "key":
        return _is_random(text)
    if key.partition(".")[0] in _GROUPS_WITH_TOKENS:
        return _SECRET_TOKEN.fullmatch(name) is not None
    return _TOKEN.fullmatch(name) is not None and _WORD.fullmatch(name) is None


def _is_random(text: str) -> bool:
    """Check whether a text is long, and letters and digits in no order that a word would have."""
    return (
        re.fullmatch(r"[\w+/=.-]{16,}", text) is not None
        and len(re.findall(r"\d", text)) > 2
        and not text.isdigit()
    )
