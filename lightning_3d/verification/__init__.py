"""`lightning-3d verify`: whether a layout computes what one process computes. Importing it imports no torch.

`compare` trains a module both ways, `shrink` makes a job small, `command` is the command line.
"""
