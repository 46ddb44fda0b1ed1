"""Rules for the test files themselves."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+(?:[\w.]+\.)?(test_\w+)", re.MULTILINE)
"""Also finds imports in functions and in scripts that a test writes."""


def imports_of_test_files(folder: Path) -> list[str]:
    """The files that import from a test file other than themselves."""
    files = [file for file in folder.rglob("*.py") if "old_files" not in file.parts]
    names = {file.stem for file in files if file.stem.startswith("test_")}
    return [
        f"{file.relative_to(folder)} imports {name}"
        for file in sorted(files)
        for name in IMPORT.findall(file.read_text("utf-8"))
        if name in names - {file.stem}
    ]


def test_no_file_imports_from_a_test_file() -> None:
    """Shared helpers belong in tests/support/: no other folder of tests is on `pythonpath`."""
    assert imports_of_test_files(TESTS) == []


def test_such_imports_are_found(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("import test_one\n")
    (tmp_path / "test_two.py").write_text("def test() -> None:\n    from test_one import helper\n")
    (tmp_path / "helpers.py").write_text(
        'SCRIPT = """\nimport tests.test_two as two\nimport test_tool\n"""\n'
    )
    assert imports_of_test_files(tmp_path) == [
        "helpers.py imports test_two",
        "test_two.py imports test_one",
    ]
