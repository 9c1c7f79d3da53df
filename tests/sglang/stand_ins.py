"""Makes SGLang's HiCache modules importable without a GPU: torchvision, which they import and do not use, is a stand-in.

Import this before anything of sglang.
"""

import importlib.machinery
import sys
import types

from transformers.utils import import_utils

# transformers remembers this answer, so that it does not take the stand-in for the real package.
assert not import_utils.is_torchvision_available()


class _Anything(type):
    """A class with any attribute, each such a class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
