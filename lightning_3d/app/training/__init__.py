"""A causal language model, data modules and callbacks, in plain Lightning; and `job` and `run`,
which train with them.

`job` manages the folder and the ranks of a run, `run` is one rank. Nothing else here depends on
parallelism.
"""
