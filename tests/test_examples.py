"""The examples run as their first lines say."""

import re
import subprocess
import sys
from pathlib import Path

from command_line import REPOSITORY, environment

from lightning_3d.checkpoint import load_full_state_dict


def test_lora(tmp_path: Path) -> None:
    command = ["examples/lora.py", "--layout", "tp2", "--devices", "2", "--steps", "20", "--checkpoint", str(tmp_path / "lora.ckpt")]
    done = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\d+\.\d+)", done.stdout)}
    assert list(losses) == [10, 20] and losses[20] < losses[10] < 4.6
    state = load_full_state_dict(tmp_path / "lora.ckpt")
    adapters = sum(value.numel() for name, value in state.items() if ".lora_" in name)
    assert f"trained {adapters} of {sum(value.numel() for value in state.values())} parameters" in done.stdout
