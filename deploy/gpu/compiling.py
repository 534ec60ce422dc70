"""`deploy/gpu/build-kvcached`: compiles kvcached from the source in an installed bundle.

Into a directory of its own, with an `activate` file: it is on no path unless that file is sourced.
The prerequisites of a compilation are checked before it begins.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from deploy.gpu import machine, toolkit
from deploy.gpu.parts import BundleRefused
from deploy.gpu.unpacking import INSTALLED

STARTUP = '''\
"""Lets the .pth file beside this one take effect."""

import pathlib
import site

site.addsitedir(str(pathlib.Path(__file__).parent))
'''
"""kvcached patches vLLM from a .pth file, which Python reads in its own directories alone."""
_TIMEOUT_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deploy/gpu/build-kvcached", description=__doc__)
    parser.add_argument("site", type=Path, help="where deploy/gpu/install unpacked a vLLM bundle")
    parser.add_argument("directory", type=Path, help="the directory of kvcached to make")
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        parser.print_help(sys.stderr)
        return 2
    asked = parser.parse_args(given)
    directory = asked.directory.resolve()
    try:
        source = kvcached_source(asked.site.resolve())
        refuse_foreign(directory)
        environment, library = build_environment(os.environ)
        build(source, directory, environment, library)
        refuse_unloadable(directory, os.environ)
    except (BundleRefused, OSError, subprocess.SubprocessError) as error:
        print(f"build-kvcached: {error}", file=sys.stderr)
        return 1
    activate = shlex.quote(str(directory / "activate"))
    print(
        f"build-kvcached: kvcached is in {directory}; next: . {activate} and KVCACHED_AUTOPATCH=1"
    )
    return 0


def kvcached_source(site: Path) -> Path:
    found = sorted(site.glob("sources/kvcached-*.tar.gz"))
    if not found:
        state = "has no sources/kvcached-*.tar.gz" if site.is_dir() else "is not there"
        raise BundleRefused(
            f"{site} {state}; name the directory that deploy/gpu/install made of vLLM"
        )
    return found[-1]


def refuse_foreign(directory: Path) -> None:
    ours = (directory / "activate").is_file() and not (directory / INSTALLED).exists()
    if not ours and directory.exists() and any(directory.iterdir()):
        raise BundleRefused(f"{directory} was not made by this script; name another directory")


def build_environment(
    environment: Mapping[str, str], *, cache: str | None = None, system: Path = toolkit.SYSTEM
) -> tuple[dict[str, str], Path]:
    """Variables of the compilation, and the driver's library. Raises BundleRefused before it."""
    for name in ("torch", "setuptools", "pip"):
        # On the path alone: setuptools answers for pip by a finder that replaces distutils.
        if PathFinder.find_spec(name) is None:
            raise BundleRefused(f"{sys.executable} has no {name}; name another one with PYTHON")
    if toolkit.compiler(environment, "CXX", ("c++", "g++", "clang++")) is None:
        raise BundleRefused("no C++ compiler here; install one or set CXX")
    nvcc = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    home = toolkit.toolkit_home(environment, nvcc, system=system)
    cache = toolkit.loader_cache() if cache is None else cache
    library = toolkit.driver_library(environment, cache, system=system)
    if library is None:
        raise BundleRefused(
            "nothing to link with: neither a driver's libcuda.so.1 (the loader's cache, "
            "LD_LIBRARY_PATH, /usr/local/nvidia) nor a toolkit's stub is here"
        )
    return {**environment, "CUDA_HOME": str(home)}, library


def build(source: Path, directory: Path, environment: Mapping[str, str], library: Path) -> None:
    """A run that was cut short leaves what was there before."""
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-compile"]
    with tempfile.TemporaryDirectory() as links:
        # The linker asks for libcuda.so; a machine with a driver alone has libcuda.so.1.
        (Path(links) / "libcuda.so").symlink_to(library)
        search = ":".join(filter(None, (links, environment.get("LIBRARY_PATH"))))
        done = subprocess.run(
            [*command, "--target", str(partial), str(source)],
            check=False,
            env={**environment, "LIBRARY_PATH": search},
            timeout=_TIMEOUT_S,
        )
    if done.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        raise BundleRefused("pip could not build it; its reasons are above")
    (partial / "sitecustomize.py").write_text(STARTUP)
    (partial / "activate").write_text(activation(directory))
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def activation(directory: Path) -> str:
    """Shell lines to source: kvcached before all else."""
    package, programs = shlex.quote(str(directory)), shlex.quote(str(directory / "bin"))
    return (
        f"export PYTHONPATH={package}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f'export PATH={programs}:"$PATH"\n'
    )


def refuse_unloadable(directory: Path, environment: Mapping[str, str]) -> None:
    """The compiled module is loaded once, by a Python of its own, with nothing patched."""
    search = ":".join(filter(None, (str(directory), environment.get("PYTHONPATH"))))
    plain = {key: value for key, value in environment.items() if key != "KVCACHED_AUTOPATCH"}
    done = subprocess.run(
        [sys.executable, "-c", "import torch, kvcached._C"],
        check=False,
        env={**plain, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        if toolkit.DRIVER in reason:
            reason = machine.NO_DRIVER
        raise BundleRefused(f"kvcached is compiled in {directory} and cannot be loaded: {reason}")


if __name__ == "__main__":
    sys.exit(main())
