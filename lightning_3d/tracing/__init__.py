"""Traces of a step: what every rank does and what its memory holds, recorded on each rank and merged on rank 0.

`recorder` takes times where the work is done, `clocks` makes those of several machines comparable, `memory` counts bytes,
`trace` is what comes of it (pure: the report reads it without torch), `tracer` decides which steps are traced and collects.
"""
