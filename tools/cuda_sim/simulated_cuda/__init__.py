"""torch's CUDA build on a machine without a GPU. See ../README.md; `autoload` does all of it when
torch is imported."""

from simulated_cuda.runtime import configure, synchronizations

__all__ = ["configure", "synchronizations"]
