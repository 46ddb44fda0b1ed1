"""Check that a layout computes what one process computes. Importing the package imports no torch.

`lightning-3d verify`: `compare` trains a module both ways, `two_runs` runs a script both ways,
`shrink` makes a job small. `lightning-3d selftest`: `session` trains the `cells`, tiny models in
which each technique is used, on ranks and in a plain loop.
"""
