"""What the recipes train with: a causal language model, data modules and callbacks. Plain Lightning; nothing knows of
parallelism.
"""
