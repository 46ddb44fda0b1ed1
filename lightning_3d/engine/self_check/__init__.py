"""Compares a rewritten model with the whole one, on the ranks of the run and before its first step.

`check` decides and compares, `frozen` lets it do so for frozen models outside the trained one,
`model_copy` makes the copies, `stages` rewrites one as for training, `compare` finds what differs,
`local_sizes` finds the sizes that code between sharded layers must read, `remembered` stores what
has been checked.
"""
