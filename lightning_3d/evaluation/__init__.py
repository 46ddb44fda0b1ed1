"""Evaluation and generation with a trained model, in any layout. Imports no torch: a command checks everything before ranks start."""
