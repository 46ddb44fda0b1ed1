"""Builds a rank's part of a model and trains it, without knowing Lightning.

`build` makes a `BuiltModel`; an `OptimizerStep` adds batches and changes the weights.
`lightning_3d.strategy` drives them from Lightning's Trainer, `lightning_3d.Engine` from a loop of
the user's.
"""
