"""Run ranks of a job without its hardware, to measure what they hold, send and compute. Importing
the package imports no torch.

`run` takes one rank through training steps on tensors without values, in process groups that send
nothing (`shapes`, which also reuses results). `meter` watches operations and `rank_report` sums up
a step, in a dry run as in a real run. `timeline` places actions in time.
"""
