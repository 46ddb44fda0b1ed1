"""Traces of a step: what every rank does and what its memory holds, recorded on each rank and
merged on rank 0.

`recorder` measures times on each rank, `clocks` makes the times of several machines comparable, and
`memory` counts bytes. `trace` is the result, which the report reads without torch.
`engine.step.tracer` decides which steps are traced, and collects the results.
"""
