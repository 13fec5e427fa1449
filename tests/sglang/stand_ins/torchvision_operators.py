"""Lets torchvision be imported beside a torch that its compiled part was not built for.

torchvision registers fake kernels for two of its operators while it is imported, and fails if nothing has declared them.
They are declared just before that import: a .pth file imports this module at each start of the interpreter, so it must
not import torch itself.
"""

import sys
from typing import Any

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
kept: list[Any] = []  # a library's operators vanish with it


class DeclareFirst:
    """Finds nothing; is asked for torchvision before the finders that do."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and not kept:
            from torch.library import Library

            kept.append(Library("torchvision", "DEF"))
            for operator in OPERATORS:
                kept[0].define(operator)


sys.meta_path.insert(0, DeclareFirst)
