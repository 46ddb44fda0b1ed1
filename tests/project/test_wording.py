"""No message uses a word for which the glossary has a plainer one. `tools/messages.py --grep` lists
the messages with a word."""

import re
import sys

import pytest
from command_line import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

from messages import Message, messages

FORBIDDEN = {
    "anew": (r"anew", "again"),
    "go on": (r"(go|goes|going|gone|went) on", "resume, continue"),
    "told": (r"told|tells", "reports, broadcasts, indicates"),
    "deal": (r"(deal|deals|dealt|dealing)(?! with)", "distribute, shard, assign"),
    "give up": (r"(give|gives|gave|given|giving) up", "stop, release, fail"),
    "beside": (r"beside", "next to, in addition to, outside"),
    "cut": (r"(?<!import )(cut|cuts|cutting)(?! off|\()", "shard, split, truncate"),
    "stand": (r"(stand|stands|stood)(?! for)", "is, appears"),
    "lie": (r"(lie|lies)(?! between)", "is, is stored"),
    "is no": (r"(?<!there )(is|are) no (?!longer|more|less)", "is not a"),
}
"""Regular expressions of whole words that a message must not use, and what to say instead."""


def uses(word: str, text: str) -> bool:
    return re.search(rf"\b({FORBIDDEN[word][0]})\b", text, re.IGNORECASE) is not None


@pytest.fixture(scope="module")
def found() -> list[Message]:
    return messages()


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_message_uses(word: str, found: list[Message]) -> None:
    hits = [f"{each.place}: {each.words}" for each in found if uses(word, each.words)]
    assert not hits, f"{len(hits)} messages; say instead: {FORBIDDEN[word][1]}\n" + "\n".join(hits)


@pytest.mark.parametrize(
    ("word", "text", "bad"),
    [
        ("is no", "rank=x is no number.", True),
        ("is no", "There is no folder. There are no ranks, and it is no longer there.", False),
        ("deal", "Heads are dealt to ranks.", True),
        ("deal", "It deals with ideals.", False),
        ("cut", "It is cut, see above.", True),
        ("cut", "The line was cut off by cutlass.", False),
        ("cut", "from lightning_3d import Cut", False),
        ("lie", "0.5 lies between 0 and 1.", False),
    ],
)
def test_words_are_found_as_whole_words(word: str, text: str, bad: bool) -> None:
    assert uses(word, text) is bad
