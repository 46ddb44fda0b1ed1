"""Memory and step time of a layout before it runs, and the search for the fastest one that fits. Pure Python: imports no torch.

`architecture` and `machine` say what a model and a cluster are, `job` what is trained how; `work` has the seconds of the parts of a
model, `memory` the bytes of a rank, `orders` and `timeline` play the pipeline's schedule, `step` puts it together, `search` chooses.
`constants` has everything that was calibrated; `measured`, `accuracy` and `calibrate` compare with published runs.
"""
