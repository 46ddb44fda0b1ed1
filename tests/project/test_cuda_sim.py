"""What is said where the simulated GPUs cannot be built, and what continuous integration does
then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOL = REPOSITORY / "tools" / "cuda_sim"


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_missing_headers_and_compilers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TOOL))
    import native_libraries

    monkeypatch.setattr(native_libraries.shutil, "which", lambda name: None)
    (tmp_path / "include" / "crt").mkdir(parents=True)
    (tmp_path / "include" / "cuda_runtime_api.h").touch()
    (tmp_path / "include" / "crt" / "host_defines.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(native_libraries.CannotBuild, match=r"g\+\+ is needed .* apt-get install"):
        native_libraries.build(tmp_path, tmp_path / "out")
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(
        native_libraries.CannotBuild,
        match="cuda_runtime_api.h .* Install a CUDA 13 toolkit, or `pip install nvidia-cuda",
    ):
        native_libraries.build(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(("wheel", "code"), [(True, 1), (False, 0)])
def test_a_failure_without_a_wheel_is_no_failure_of_the_tests(
    tmp_path: Path, wheel: bool, code: int
) -> None:
    """`make test-cuda` fails: because of a test, or because there is no CUDA wheel of torch."""
    for folder in (".ci", "tools", "bin", ".venv-cuda"):
        (tmp_path / folder).mkdir()
    shutil.copy(REPOSITORY / ".ci" / "run", tmp_path / ".ci")
    program(tmp_path / "tools", "install_chromium.sh", "true")
    program(tmp_path / "bin", "make", '[ "$1" != test-cuda ]')
    if not wheel:
        (tmp_path / ".venv-cuda" / "no_wheel").touch()
    variables = os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [tmp_path / ".ci" / "run"], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert ("THE CUDA PATHS WERE NOT TESTED" in done.stdout) is not wheel


def test_the_first_hour_needs_a_gpu(tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "exit 9")
    variables = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
    }
    script = REPOSITORY / "tools" / "first_gpu_hour.sh"
    done = subprocess.run(
        ["sh", script], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "nvidia-smi lists no GPU" in done.stderr


def test_the_page_of_the_simulator_names_every_variable() -> None:
    source = "".join(path.read_text() for path in (TOOL / "native").iterdir())
    page = (TOOL / "README.md").read_text()
    known = {
        word.strip('"(),')
        for word in source.replace("(", " ").split()
        if word.startswith('"CUDASIM_')
    }
    assert known and all(name in page for name in known), known
