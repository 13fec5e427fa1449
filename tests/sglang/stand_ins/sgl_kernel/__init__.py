"""Stands in for SGLang's compiled kernels on a CPU that has none.

The server imports kernels by the dozen and, with `--attention-backend torch_native`, calls none of them.  So any name can be
imported, from here and from any submodule; what is called raises, since a wrong result would be worse than none.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0+none"
__path__: list[str] = []


class ScalarType:
    """Named in annotations only."""


class NoKernels(ModuleType):
    """A submodule in which any name is an absent kernel."""

    def __getattr__(self, name: str) -> Any:
        return __getattr__(name)


class Finder:
    """Finds `sgl_kernel.<anything>`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, Finder, is_package=True) if name.startswith(f"{__name__}.") else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return NoKernels(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        module.__path__ = []


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "scalar_types":
        return NoKernels(f"{__name__}.scalar_types")
    if name == "copy_all_layer_kv_cache_cpu":  # called when the cache is set up, with nothing to copy
        return lambda *_, **__: None

    def absent(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: there are no compiled kernels on this machine")

    absent.__name__ = name
    return absent


sys.meta_path.append(Finder)
