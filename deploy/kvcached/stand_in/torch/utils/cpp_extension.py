"""Extensions that are named and never built."""

from typing import Any

from setuptools import Extension  # type: ignore[import-untyped]
from setuptools.command.build_ext import build_ext  # type: ignore[import-untyped]


def include_paths(**_: Any) -> list[str]:
    return []


def library_paths(**_: Any) -> list[str]:
    return []


def CppExtension(name: str, *_: Any, **__: Any) -> Extension:  # noqa: N802 - torch's name
    return Extension(name, sources=[])


CUDAExtension = CppExtension


class BuildExtension(build_ext):  # type: ignore[misc]
    def run(self) -> None:
        pass

    def get_outputs(self) -> list[str]:
        return []
