"""`lightning-3d dryrun`: what ranks of a job would hold, send and compute, without its hardware. Importing it imports no torch.

`run` takes one rank through training steps, on tensors without values in process groups that send nothing (`shapes`; `remembered`: what
operations returned before). `metering` watches operations, `measured` makes of that what a rank does in a step, of a dry run and of a real
one alike. `timeline` places actions in time. `command` is the command line.
"""
