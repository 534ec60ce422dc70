"""What kvcached's build asks of torch, answered without one: a CUDA build, so that it goes on."""

from types import SimpleNamespace

__version__ = "2.13.0"
_C = SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
version = SimpleNamespace(cuda="13.0", hip=None)
