"""Sweeps: several runs, each in its own processes and folder. All configurations are checked before
the first run starts."""
