"""Sweeps: several runs, each in processes and a folder of its own, from configurations that are checked before the first starts."""
