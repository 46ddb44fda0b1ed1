"""Whether a model computes on its ranks what it computes whole, tried before the first step on the ranks that are there.

`check` decides and compares, `model_copy` makes the copies, `stages` rewrites one as for training, `compare` finds what differs,
`local_sizes` finds the numbers that code between cut layers must read, `remembered` knows what has been checked.
"""
