"""Makes the environment of `make test-cuda`: torch's CUDA build on simulated libraries, and all
other packages of another environment.

    python make_environment.py FOLDER BASE_PYTHON
"""

from __future__ import annotations

import subprocess
import sys
import time
import venv
from pathlib import Path

from native_libraries import CannotBuild, build

TOOL = Path(__file__).resolve().parent
NO_WHEEL = "no_wheel"
"""Name of a file that says that the package registry has no CUDA wheel; `.ci/run` looks for it."""


class NoWheel(Exception):
    """The package registry has no CUDA wheel of torch."""


def make(folder: Path, base_python: Path) -> None:
    """Create the environment in ``folder``, or bring it up to date; ``base_python`` is the
    interpreter whose packages it shares.

    Raises:
        NoWheel: the CUDA wheel of the same version of torch cannot be had.
        CannotBuild: the libraries cannot be built.
    """
    version, packages = _of(base_python)
    python = folder / "bin" / "python"
    site = _torch_of(python, version)
    if site is None:
        site = _install(folder, version)
    build(site / "torch" / "lib", folder / "simulated_cuda")
    lines = [
        f"import site; site.addsitedir({str(packages)!r})",
        str(TOOL),
        "import simulated_cuda.autoload",
    ]
    (site / "simulated_cuda.pth").write_text("\n".join([*lines, ""]))
    tool = folder / "bin" / "nvidia-smi"
    tool.unlink(missing_ok=True)
    tool.symlink_to(TOOL / "bin" / "nvidia-smi")


def _install(folder: Path, version: str) -> Path:
    """A new environment with the CUDA wheel of torch; the folder of its packages."""
    venv.create(folder, with_pip=True, clear=True)
    # `===` asks for this very name: the wheel of the registry, which is the CUDA build, and no
    # other build that may lie on this machine
    wheel = ["install", "--disable-pip-version-check", "--no-deps", "--quiet", f"torch==={version}"]
    install = [folder / "bin" / "python", "-m", "pip", *wheel]
    if subprocess.run(install, check=False).returncode:
        raise NoWheel(f"The CUDA wheel of torch {version} cannot be had from the package registry.")
    site = _torch_of(folder / "bin" / "python", version)
    if site is None:
        raise NoWheel(
            f"The registry's wheel of torch {version} for this platform is no CUDA build."
        )
    return site


def _torch_of(python: Path, version: str) -> Path | None:
    """Folder of an environment's own packages if they have the CUDA build of this version of
    torch."""
    if not python.exists():
        return None
    site = Path(_output(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    found = (site / f"torch-{version}.dist-info").is_dir() and (
        site / "torch" / "lib" / "libtorch_cuda.so"
    ).exists()
    return site if found else None


def _of(python: Path) -> tuple[str, Path]:
    """(version of torch without the name of its build, folder of the packages) of an
    environment."""
    code = (
        "import importlib.metadata, sysconfig; print(importlib.metadata.version('torch'));"
        " print(sysconfig.get_paths()['purelib'])"
    )
    version, packages = _output(python, code).splitlines()
    return version.partition("+")[0], Path(packages)


def _output(python: Path, code: str) -> str:
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    started = time.monotonic()
    try:
        make(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
    except NoWheel as error:
        (Path(sys.argv[1]) / NO_WHEEL).touch()
        sys.exit(f"Error: {error}")
    except CannotBuild as error:
        sys.exit(f"Error: {error}")
    print(f"{sys.argv[1]} is ready, after {time.monotonic() - started:.0f} s")
