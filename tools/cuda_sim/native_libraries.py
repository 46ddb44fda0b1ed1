"""Builds the simulated libraries that torch's CUDA build loads: what is simulated, and stubs that
name themselves for the rest.

    python native_libraries.py TORCH_LIB_FOLDER OUT_FOLDER

What torch links against, and which symbols it takes from there, is read from its libraries, so
another version needs no list.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NATIVE = Path(__file__).parent / "native"

SOURCES = {
    "libcudart": ("streams.cpp", "memory.cpp", "races.cpp", "devices.cpp"),
    "libnccl": ("nccl.cpp",),
    "libcuda": ("driver.cpp",),
    "libnvidia-ml": ("nvml.cpp",),
}
"""What is simulated; of every other library there are stubs only."""

PREFIXES = {
    "libcudart": ("cuda", "__cuda"),
    "libnccl": ("nccl",),
    "libcublasLt": ("cublasLt",),
    "libcublas": ("cublas",),
    "libcudnn": ("cudnn",),
    "libcufft": ("cufft",),
    "libcurand": ("curand",),
    "libcusolver": ("cusolver",),
    "libcusparseLt": ("cusparseLt",),
    "libcusparse": ("cusparse",),
    "libnvshmem": ("nvshmem",),
    "libcufile": ("cuFile",),
    "libcupti": ("cupti",),
    "libnvrtc": ("nvrtc",),
    "libnvJitLink": ("nvJitLink", "__nvJitLink"),
    "libnvToolsExt": ("nvtx",),
    "libcuda": ("cu",),
}
"""How the symbols of a library begin; the first that fits counts."""

NOT_SUPPORTED = {"libcudart": 801, "libcuda": 801, "libnccl": 4, "libcupti": 0}
"""What a stub returns, which its library calls an error; 1 otherwise. CUPTI's say success: the
profiler without it has no device times."""

LOADED_BY_NAME = {"libnvidia-ml.so.1"}
"""Libraries that torch is not linked to, but opens."""

OF_THE_SYSTEM = re.compile(
    r"^(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux.*|libgomp.*)\.so"
)

COMPILE = ["g++", "-std=c++20", "-O1", "-g1", "-Wall", "-Werror", "-fPIC", "-shared"]


class CannotBuild(Exception):
    """Something that the build needs is not on this machine."""


def build(torch_lib: Path, out: Path) -> list[Path]:
    """Build every library that the CUDA build of torch in ``torch_lib`` needs and this machine does
    not have.

    Returns:
        Their paths in the order in which they must be loaded.

    Raises:
        CannotBuild: there is no compiler, or there are no CUDA headers.
    """
    headers = _cuda_headers()
    for tool in ("g++", "readelf", "nm"):
        if shutil.which(tool) is None:
            raise CannotBuild(
                f"{tool} is needed to build the simulated CUDA libraries. Install it (Debian:"
                " apt-get install g++ binutils)."
            )
    out.mkdir(parents=True, exist_ok=True)
    needed, symbols = _links(torch_lib)
    # the runtime first: the others are linked to it
    names = sorted(
        needed | LOADED_BY_NAME, key=lambda name: (not name.startswith("libcudart"), name)
    )
    with tempfile.TemporaryDirectory() as scratch:
        return [
            _library(name, symbols.get(_stem(name), []), headers, out, Path(scratch))
            for name in names
        ]


def _cuda_headers() -> Path:
    """Folder with ``cuda_runtime_api.h``: of a CUDA toolkit, or of the package nvidia-cuda-runtime
    of this environment."""
    nvcc = shutil.which("nvcc")
    folders = [
        Path(os.environ[name]) / "include"
        for name in ("CUDA_HOME", "CUDA_PATH")
        if os.environ.get(name)
    ]
    folders += [Path("/usr/local/cuda/include")]
    folders += [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
    folders += [Path(entry) / "nvidia" / "cu13" / "include" for entry in sys.path if entry]
    for folder in folders:
        if (folder / "cuda_runtime_api.h").exists() and (
            folder / "crt" / "host_defines.h"
        ).exists():
            return folder
    raise CannotBuild(
        "cuda_runtime_api.h and crt/host_defines.h are neither in CUDA_HOME nor in /usr/local/cuda"
        " nor among this environment's packages. Install a CUDA 13 toolkit, or `pip install"
        " nvidia-cuda-runtime nvidia-cuda-crt`."
    )


def _links(torch_lib: Path) -> tuple[set[str], dict[str, list[str]]]:
    """(libraries that are needed and not there, for each stem of a library the symbols that are
    taken from it)."""
    needed: set[str] = set()
    undefined: set[str] = set()
    libraries = list(torch_lib.glob("*.so*"))
    for library in libraries:
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-d", str(library))))
        for line in _output("readelf", "--dyn-syms", "-W", str(library)).splitlines():
            fields = line.split()
            if len(fields) >= 8 and fields[6] == "UND":
                undefined.add(fields[7].partition("@")[0])
    symbols: dict[str, list[str]] = {}
    for symbol in sorted(undefined):
        stem = next((stem for stem, starts in PREFIXES.items() if symbol.startswith(starts)), None)
        if stem is not None:
            symbols.setdefault(stem, []).append(symbol)
    present = {library.name for library in libraries}
    return {name for name in needed - present if not OF_THE_SYSTEM.match(name)}, symbols


def _stem(name: str) -> str:
    return name.partition(".so")[0].partition("_")[0]


def _library(name: str, symbols: list[str], headers: Path, out: Path, scratch: Path) -> Path:
    """Build one library: its simulation, if there is one, and a stub for each symbol that this does
    not define."""
    stem = _stem(name)
    sources = [str(NATIVE / source) for source in SOURCES.get(stem, ())]
    command = [*COMPILE, f"-I{headers}", f"-I{NATIVE}", f"-Wl,-soname,{name}", *sources]
    runtime = (
        []
        if stem == "libcudart"
        else [f"-L{out}", "-l:" + next((p.name for p in out.glob("libcudart.so*")), "")]
    )
    link = [*(runtime if sources else []), "-lpthread"]
    defined: set[str] = set()
    if sources:
        _run([*command, "-o", str(scratch / name), *link])
        defined = {
            line.split()[-1]
            for line in _output("nm", "-D", "--defined-only", str(scratch / name)).splitlines()
        }
    stubs = scratch / f"{stem}_stubs.cpp"
    stubs.write_text(
        _stubs([symbol for symbol in symbols if symbol not in defined], NOT_SUPPORTED.get(stem, 1))
    )
    _run([*command, str(stubs), "-o", str(out / name), *link])
    return out / name


def _stubs(symbols: list[str], returned: int) -> str:
    """Source of functions that say once that they are not simulated, and return an error."""
    lines = [
        "#include <cstdio>",
        "#include <unistd.h>",
        '#define STUB(name) extern "C" __attribute__((visibility("default"))) int name() { \\',
        (
            '  static int told; if (!told++) fprintf(stderr, "[cudasim %d] not simulated: " #name'
            ' "\\n", getpid()); \\'
        ),
        f"  return {returned}; }}",
    ]
    return "\n".join([*lines, *(f"STUB({symbol})" for symbol in symbols), ""])


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{' '.join(command)} failed:\n{done.stderr}")


if __name__ == "__main__":
    try:
        for made in build(Path(sys.argv[1]), Path(sys.argv[2])):
            print(made)
    except CannotBuild as error:
        sys.exit(f"Error: {error}")
