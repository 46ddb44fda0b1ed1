"""Memory and step time of a layout before it runs, and the search for the fastest one that fits.
Pure Python: imports no torch.

`architecture` describes a model, `machine` a cluster, `stack` the software, and `job` a training
step. `block_costs` predicts the seconds of a model's parts, `memory` the bytes of a rank,
`timeline` plays the pipeline's schedule, `step_time` combines them, and `search` chooses.
`constants` has everything that was calibrated; `benchmarks/planner_accuracy` compares with
published runs.
"""
