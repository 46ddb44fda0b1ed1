"""The pipeline engine: split a model into stages and run a schedule over micro-batches.

`stages` decides which layers a rank keeps, `gates` replaces the others, `schedule` gives the order
of actions, `transport` moves activations and gradients between neighbors, and `engine` runs the
actions.
"""

from lightning_3d.parallel.pipeline.engine import PipelineEngine
from lightning_3d.parallel.pipeline.gates import runs_now
from lightning_3d.parallel.pipeline.stages import StageAssignment, assign_stages, keep_owned
from lightning_3d.parallel.pipeline.state import Chunk, PipelineState, StageBoundary
from lightning_3d.parallel.pipeline.unknown import Partial, Unknown, first_unknown

__all__ = [
    "Chunk",
    "Partial",
    "PipelineEngine",
    "PipelineState",
    "StageAssignment",
    "StageBoundary",
    "Unknown",
    "assign_stages",
    "first_unknown",
    "keep_owned",
    "runs_now",
]
