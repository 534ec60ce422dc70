"""`deploy/gpu/carry`: packs a bundle of Python packages for a GPU machine without network.

The packages that the machine lacks are laid out here as they shall lie there, stripped, compressed
as one archive and cut into parts. Nothing runs there but Python's own archive modules.
"""

import argparse
import io
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from deploy.gpu import itinerary, selection
from deploy.gpu.missing import Missing, missing_wheels, read_names, read_requirements
from deploy.gpu.parts import PART_LIMIT_BYTES, BundleRefused, PartWriter, read_manifest
from deploy.gpu.registry import TARGET, Lock, Registry, read_lock
from deploy.gpu.stripping import size_bytes, strip
from deploy.gpu.wheel import CarryError, Wheel

TREE = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
KVCACHED_LOCK = TREE / "deploy/kvcached/requirements.txt"
SOURCES = "sources"
"""The folder of the bundle with what is compiled on the machine itself."""
_PRESET = 9
"""xz's dictionary of 64 MiB: kernels of one family lie far apart and are much alike."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deploy/gpu/carry", description=__doc__)
    parser.add_argument("--vllm", default=selection.DEFAULT_VLLM, help="version")
    parser.add_argument(
        "--only", choices=[itinerary.ROSEMUX], help="RoseMux's own needs, a few MiB"
    )
    parser.add_argument("--present", type=Path, default=HERE / "present.txt")
    parser.add_argument("--left-out", type=Path, default=HERE / "left_out.txt")
    parser.add_argument("--out", type=Path, default=TREE / "build/carry")
    parser.add_argument("--wheels", type=Path, default=TREE / "build/carry-wheels")
    parser.add_argument("--part-mib", type=int, default=PART_LIMIT_BYTES >> 20)
    parser.add_argument(
        "--every-architecture", action="store_true", help="keep the kernels of all GPUs (larger)"
    )
    asked = parser.parse_args(arguments)
    try:
        _carry(asked)
    except (CarryError, BundleRefused, OSError) as error:
        print(f"carry: {error}", file=sys.stderr)
        return 1
    return 0


def _carry(asked: argparse.Namespace) -> None:
    lock = read_lock((TREE / "requirements.lock").read_text())
    registry = Registry(asked.wheels, lock)
    present = read_names(asked.present.read_text())
    requirements = selection.rosemux_requirements((TREE / "pyproject.toml").read_text())
    roots: list[Wheel] = []
    bundle = itinerary.ROSEMUX
    if asked.only is None:
        vllm = registry.fetch(canonicalize_name("vllm"), SpecifierSet(f"=={asked.vllm}"))
        selection.refuse_another_torch(vllm, present)
        roots.append(vllm)
        requirements += [Requirement(text) for text in selection.KVCACHED_REQUIREMENTS]
        bundle = f"vllm-{vllm.version}"
    missing = missing_wheels(
        roots,
        requirements,
        present=present,
        left_out=read_names(asked.left_out.read_text()),
        replaced=read_requirements((HERE / "replaced.txt").read_text()),
        fetch=registry.fetch,
    )
    _report(missing, lock)
    folder = asked.out / bundle
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=asked.out, prefix="site-") as name:
        site = Path(name)
        lay_out([wheel.path for wheel in (*roots, *missing.wheels)], site)
        if roots:
            done = strip(site, every_architecture=asked.every_architecture)
            removed, zeroed = done.removed_bytes >> 20, done.zeroed_bytes >> 20
            print(f"stripped: {removed} MiB removed, {zeroed} MiB zeroed")
            (site / SOURCES).mkdir()
            sources = Registry(asked.wheels, read_lock(KVCACHED_LOCK.read_text()))
            shutil.copy2(sources.source(selection.KVCACHED), site / SOURCES)
        print(f"compressing {size_bytes(site) >> 20} MiB (minutes)", flush=True)
        pack(site, folder, bundle, limit_bytes=asked.part_mib << 20)
    print(itinerary.text(folder, read_manifest(folder), TREE))


def lay_out(wheels: Sequence[Path], site: Path) -> None:
    """Install wheels of the target machine into a directory, as pip there would."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--no-deps", "--no-index", "--no-compile", *TARGET, "--target", str(site)]
    done = subprocess.run(
        [*command, *map(str, wheels)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise CarryError(f"pip could not lay out the wheels: {done.stderr.strip()[-1000:]}")


def pack(site: Path, folder: Path, bundle: str, *, limit_bytes: int) -> None:
    """Write `site` as parts into `folder`; the same files give the same bytes."""
    writer = PartWriter(folder, bundle, limit_bytes=limit_bytes)
    with (
        io.BufferedWriter(writer) as file,
        lzma.LZMAFile(file, "wb", preset=_PRESET) as stream,
        tarfile.open(fileobj=stream, mode="w|") as archive,
    ):
        # Libraries first and alike beside alike, within reach of the compressor's dictionary.
        for path in sorted(site.rglob("*"), key=lambda path: (path.suffix != ".so", path)):
            archive.add(path, str(path.relative_to(site)), recursive=False, filter=_anonymous)
    writer.write_manifest()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _report(missing: Missing, lock: Lock) -> None:
    print(f"{len(missing.wheels)} wheels are missing there:")
    print(" ", ", ".join(f"{wheel.name} {wheel.version}" for wheel in missing.wheels))
    unlocked = [str(w.name) for w in missing.wheels if lock.versions.get(w.name) != w.version]
    print("  not in requirements.lock, so without a hash:", ", ".join(unlocked) or "none")
    print("  left out:", ", ".join(missing.left_out) or "nothing")
    for mismatch in missing.mismatches:
        print(f"  look: {mismatch}")


if __name__ == "__main__":
    sys.exit(main())
