"""Mechanisms that watch over a run between two checkpoints."""
