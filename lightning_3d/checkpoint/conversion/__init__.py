"""Conversion of other programs' checkpoints: Lightning's files and FSDP folders, DeepSpeed's
folders.

`lightning_file`, `fsdp_folder` and `deepspeed_folder` each return a `Foreign`, whose tensors are
read later. `safe_unpickler` reads files of `torch.save` without running code. `lightning_file` also
finds the parameter names, which a plain optimizer state does not contain.
"""

from lightning_3d.checkpoint.conversion.convert import Converted, convert, read_foreign
from lightning_3d.checkpoint.conversion.source_contents import Foreign, Later

__all__ = ["Converted", "Foreign", "Later", "convert", "read_foreign"]
