"""Let PyPI's torchvision be imported beside a CPU build of torch.

PyPI's torchvision is compiled against CUDA torch. Beside a CPU torch its extension cannot be
loaded, and ``import torchvision`` then fails with ``operator torchvision::nms does not exist``,
because ``torchvision._meta_registrations`` describes two operators that only the extension defines.
SGLang imports torchvision on its text path too, before it loads any plugin.

A ``.pth`` file imports this module at every Python start of the server environment, so it does
nothing but put one finder on ``sys.meta_path``. The finder waits for
``torchvision._meta_registrations``, which torchvision imports right after it has tried its
extension, defines the missing schemas if that failed, and removes itself. Without torchvision, or
with one whose own operators load, nothing is defined.
"""

from __future__ import annotations

import sys

_WAIT_FOR = "torchvision._meta_registrations"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library = None  # torch drops the operators of a library that is garbage-collected


def define_missing_operators() -> bool:
    """Define the two schemas unless torchvision has its own; True if they were defined."""
    global _library
    extension = sys.modules.get("torchvision.extension")
    if _library is not None or extension is None or extension._has_ops():
        return False
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _library = library
    return True


class _Finder:
    """Finds nothing; only notices that torchvision is about to need its operators."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == _WAIT_FOR:
            sys.meta_path.remove(cls)
            define_missing_operators()
        return None


sys.meta_path.insert(0, _Finder)
