"""What makes `python train.py` and the command `lightning-3d` of the engine and the strategy.
Nothing below imports it."""
