"""Conversion of other programs' checkpoints: Lightning's files and FSDP folders, DeepSpeed's folders.

`lightning_file`, `fsdp_folder` and `deepspeed_folder` each make a `Foreign` of what they read, tensors unread; `pickles` reads what torch
has saved without running code, `parameter_order` finds the names that a plain optimizer state leaves out.
"""

from lightning_3d.checkpoint.conversion.convert import Converted, convert, read_foreign
from lightning_3d.checkpoint.conversion.source_contents import Foreign, Later

__all__ = ["Converted", "Foreign", "Later", "convert", "read_foreign"]
