"""Check that a layout computes what one process computes. Importing the package imports no torch.

`compare` trains a module both ways, `shrink` makes a job small.
"""
