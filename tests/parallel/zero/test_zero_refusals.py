"""What a data-parallel backend refuses, and that DeepSpeed's says nothing."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from command_line import environment
from ranks import run_ranks
from torch import nn

from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout.layout import Layout
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import cut_along, replicated
from lightning_3d.parallel.zero import make_backend


def refusal(stage: int, precision: str, dtype: torch.dtype, optimizer: str) -> str:
    """The message with which a backend refuses to train one linear layer of which each rank holds a
    part."""
    mesh = Mesh(Layout.parse("tp1"))
    module = nn.Linear(4, 4, bias=False, dtype=dtype)
    spec = cut_along("weight", (8, 4), 0, [(0, 4)], tp_replicas=(0,))
    try:
        backend = make_backend(
            ZeroOptions(stage, "step"), mesh, {"weight": spec}, precision=precision
        )
        other = nn.Linear(2, 2) if optimizer == "foreign" else module
        make = getattr(torch.optim, "SGD" if optimizer == "foreign" else optimizer)
        backend.prepare(module, make(other.parameters(), lr=1e-3))
    except (ConfigError, LayoutError) as error:
        assert error.exit_code == 2
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("stage", "precision", "dtype", "optimizer", "words"),
    [
        (1, "fp64", torch.float64, "AdamW", "double precision"),
        (1, "fp32", torch.float64, "AdamW", "float64"),
        (0, "fp32", torch.bfloat16, "AdamW", "bf16-true"),
        (0, "fp32", torch.float16, "AdamW", "float16"),
        (
            0,
            "fp32",
            torch.float32,
            "LBFGS",
            "LBFGS computes the loss several times in a step, by a closure",
        ),
        (
            0,
            "fp32",
            torch.float32,
            "Adafactor",
            "It needs whole weight matrices, which this layout would shard",
        ),
        (0, "fp32", torch.float32, "Muon", "Use an elementwise optimizer (AdamW, Adam, NAdam"),
        (0, "fp32", torch.float32, "foreign", "not in the module"),
    ],
)
def test_refusals(
    stage: int, precision: str, dtype: torch.dtype, optimizer: str, words: str
) -> None:
    assert words in run_ranks(refusal, 1, stage, precision, dtype, optimizer)[0]


def refusal_of_shape(stage: int, shape: tuple[int, ...]) -> str:
    module = nn.Linear(4, 4, bias=False)
    module.scale = nn.Parameter(torch.ones(shape))
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    backend = make_backend(ZeroOptions(stage, "step"), Mesh(Layout.parse("tp1")), specs)
    with pytest.raises(ConfigError) as refused:
        backend.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    return str(refused.value)


@pytest.mark.parametrize("shape", [(), (0, 3)], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_cannot_be_cut(stage: int, shape: tuple[int, ...]) -> None:
    assert (
        f"no dimensions or no elements: scale {shape}. Reshape single numbers to (1,)"
        in run_ranks(refusal_of_shape, 1, stage, shape)[0]
    )


SCRIPT = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn

    from lightning_3d.layout import Layout
    from lightning_3d.parallel.mesh import Mesh
    from lightning_3d.parallel.sharding import replicated
    from lightning_3d.parallel.zero import make_backend
    from lightning_3d.options.zero import ZeroOptions

    assert "deepspeed" not in sys.modules, "DeepSpeed takes a second to import; stage 0 does not need it"
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
    module = nn.Linear(4, 4)
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    backend = make_backend(ZeroOptions(1, "step"), Mesh(Layout()), specs)
    backend.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    for _ in range(3):
        with backend.gradient_scope():
            module(torch.ones(1, 4)).sum().backward()
            backend.reduce(1.0)
        backend.clip(max_norm=1.0)
        backend.step()
    assert not {"DS_ACCELERATOR", "LOCAL_RANK"} & set(os.environ)
    assert "torch._inductor.compile_fx" not in sys.modules, "importing the compiler takes seconds"
"""  # noqa: E501


@pytest.mark.slow
def test_deepspeed_is_silent_and_imports_no_compiler(tmp_path: Path) -> None:
    """In a process of its own that was started by no launcher, with all warnings on, and without a
    teardown."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).parents[3])
    bare = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": root,
        "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-W", "default::FutureWarning", str(script), str(tmp_path / "store")]
    done = subprocess.run(
        command, env=bare, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


PRELOADED = """
    import os, sys
    os.environ["DS_ACCELERATOR"] = "cpu"
    from lightning_3d.ranks.supervisor import can_fork
    from lightning_3d.app.training.run import preload

    preload({"model": {"config": {"model_type": "llama"}}, "parallelism": {"zero_stage": 1}, "cluster": {"accelerator": "cpu"}})
    before = set(sys.modules)
    assert can_fork()
    sys.argv = ["script", "STORE"]
"""  # noqa: E501


@pytest.mark.full
def test_what_a_first_engine_imports_is_there_before_ranks_are_forked(tmp_path: Path) -> None:
    """The import leaves no thread behind, which would forbid the fork, and the engine of a rank
    adds nothing of DeepSpeed to it."""
    lines = textwrap.dedent(SCRIPT).splitlines()
    engine = "\n".join(
        line for line in lines if "not in sys.modules" not in line and "DS_ACCELERATOR" not in line
    )
    after = (
        'new = [name for name in set(sys.modules) - before if name.startswith("deepspeed")]\nassert'
        " not new, new\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(PRELOADED).replace("STORE", str(tmp_path / "store")) + engine + "\n" + after
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
