"""Layouts: their names, and the rules by which they suit a model, a batch and a schedule. Imports
no torch."""

from lightning_3d.layout.layout import Layout

__all__ = ["Layout"]
