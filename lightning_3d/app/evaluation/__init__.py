"""Evaluation and generation with a trained model, in any layout."""
