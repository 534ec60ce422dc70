"""A stand-in for torch during kvcached's build: claims a CUDA build, so that the build proceeds."""

from types import SimpleNamespace

__version__ = "2.13.0"
_C = SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
version = SimpleNamespace(cuda="13.0", hip=None)
