"""Drafts of parallel plans for models that declare none, derived from the flow of data through the
model."""

from lightning_3d.engine.plan_draft.draft import Draft, draft_plan

__all__ = ["Draft", "draft_plan"]
