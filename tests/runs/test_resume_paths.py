"""Every way to go on with a run reads the rows and takes the steps of a run that nothing has
disturbed."""

import shutil
from pathlib import Path

import pytest
from command_line import run_commands
from quick_runs import QUICK, losses

OFTEN = [
    "trainer.checkpoint_every_n_steps=2",
    "trainer.val_check_interval=2",
    "trainer.keep_last=1",
]
STEPS = [*QUICK, *OFTEN, "optimizer.scheduler.name=constant", "cluster=local_cpu"]
LONGER = [*STEPS, "trainer.max_steps=6"]


def extend(folder: Path) -> Path:
    """Let the stored configuration of a run ask for more steps."""
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("max_steps: 4", "max_steps: 6"))
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_path_of_a_resume(tmp_path: Path) -> None:
    first, whole = tmp_path / "first", tmp_path / "whole"
    run_commands(
        [
            ["train", *LONGER, f"hydra.run.dir={whole}"],
            ["train", *STEPS, "trainer.max_steps=4", f"hydra.run.dir={first}"],
        ]
    )
    expected = losses(whole)
    assert len(expected) == 6 and losses(first) == expected[:4]
    places = {name: tmp_path / name for name in ("same", "layout", "refused", "stored")}
    for place in places.values():
        shutil.copytree(first, place)
    moved = tmp_path / "moved" / "there"
    moved.parent.mkdir()
    shutil.copytree(first, tmp_path / "original")
    (tmp_path / "original").rename(moved)
    copied = tmp_path / "copies" / "step_4.ckpt"
    shutil.copytree(first / "checkpoints" / "step_4.ckpt", copied)
    elsewhere = [
        f"hydra.run.dir={tmp_path / 'elsewhere'}",
        f"callbacks.checkpoint.dirpath={tmp_path / 'disk'}",
    ]
    ways: dict[str, list[str]] = {
        "the same folder": [
            "train",
            *LONGER,
            f"hydra.run.dir={places['same']}",
            "trainer.auto_resume=true",
        ],
        "another layout": [
            "train",
            *LONGER,
            "parallelism=tp2",
            f"hydra.run.dir={places['layout']}",
            "trainer.auto_resume=true",
        ],
        "a refusal": [
            "train",
            *LONGER,
            "seed=7",
            f"hydra.run.dir={places['refused']}",
            "trainer.auto_resume=true",
        ],
        "after the refusal": [
            "train",
            *LONGER,
            f"hydra.run.dir={places['refused']}",
            "trainer.auto_resume=true",
        ],
        "the stored configuration": ["run", str(extend(places["stored"])), "--resume"],
        "a moved folder": ["run", str(extend(moved)), "--resume"],
        "a copied checkpoint": [
            "train",
            *LONGER,
            f"hydra.run.dir={tmp_path / 'new'}",
            f"trainer.resume={copied}",
        ],
        "checkpoints elsewhere": ["train", *STEPS, "trainer.max_steps=4", *elsewhere],
        "resumed from elsewhere": ["train", *LONGER, *elsewhere, "trainer.auto_resume=true"],
    }
    results = dict(zip(ways, run_commands(list(ways.values()), timeout=500), strict=True))
    assert {name: result.code for name, result in results.items()} == {
        name: 2 if name == "a refusal" else 0 for name in ways
    }, results
    for folder in (
        places["same"],
        places["refused"],
        places["stored"],
        moved,
        tmp_path / "elsewhere",
    ):
        assert losses(folder) == expected, folder
    assert losses(tmp_path / "new") == expected[4:]
    assert list(map(float, losses(places["layout"]))) == pytest.approx(
        list(map(float, expected)), rel=1e-4
    )
