"""Train a model over several kinds of parallelism: `python train.py parallelism=tp2_pp2_dp2
trainer.max_steps=100`."""

import sys

from lightning_3d.app.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
