"""tools/weight.py counts what it says."""

import sys
from pathlib import Path

from command_line import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))
from weight import report, tokens


def test_comments_and_docstrings_weigh_nothing_and_packing_saves_nothing() -> None:
    plain = "a = 1\nb = 2\n"
    assert tokens('"""Words."""\n# more words\n' + plain) == tokens(plain)
    assert tokens("a = 1; b = 2\n") >= tokens(plain)


def test_a_folder_is_described(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "one.py").write_text("class Twice: pass\n")
    (package / "two.py").write_text(
        f"from package.one import Twice as T\nclass Twice(T): pass\nx = '{'y' * 100}'\n"
    )
    assert (
        "2 files, 1 modules with one importer, 1 class names used more than once, 1 lines over 100"
        " columns" in report(package)
    )
