"""`deploy/gpu/join` and `deploy/gpu/install`: a bundle's parts become a directory of packages.

They run on the machine without network; the directory gets an `activate` file to source.
Needs nothing but Python; writes only below the directories that the command line names. RoseMux
itself stays where this file lies: `activate` names its tree, and metadata written beside the
packages make its entry points known there.
"""

import argparse
import io
import lzma
import shlex
import shutil
import sys
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.gpu import parts
from deploy.gpu.parts import BundleRefused

TREE = Path(__file__).resolve().parents[2]
INSTALLED = "installed-bundle.json"
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""FlashInfer is not carried; the others keep vLLM and Transformers from asking a network."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deploy/gpu")
    commands = parser.add_subparsers(dest="command", required=True)
    join = commands.add_parser("join", help="take a bundle's parts, as many as are there")
    join.add_argument("bundle", type=Path, help="the folder that was carried")
    join.add_argument(
        "directory", type=Path, help="where the parts are collected, outside the tree"
    )
    install = commands.add_parser("install", help="unpack when all parts are there")
    install.add_argument("directory", type=Path, help="where the parts were collected")
    install.add_argument("site", type=Path, help="the directory of packages to make")
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "join":
            return _join(asked.bundle, asked.directory)
        return _install(asked.directory, asked.site.resolve())
    except (BundleRefused, OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        print(f"{asked.command}: {error}", file=sys.stderr)
        return 1


def _join(bundle: Path, directory: Path) -> int:
    missing = parts.join(bundle, directory)
    count = len(parts.read_manifest(directory).parts)
    if missing:
        names = ", ".join(part.file_name for part in missing)
        print(f"join: {count - len(missing)} of {count} parts; still missing: {names}")
    else:
        print(f"join: all {count} parts are there and whole")
    return 0


def _install(directory: Path, site: Path) -> int:
    manifest = parts.read_manifest(directory)
    marker = site / INSTALLED
    if marker.exists() and marker.read_bytes() == manifest.encode():
        _settle(site)
        print(f"install: {site} has {manifest.bundle} already")
        return 0
    if site.exists() and any(site.iterdir()):
        raise BundleRefused(f"{site} has something else in it; name another directory")
    if missing := parts.missing(directory, manifest):
        raise BundleRefused(f"missing or torn: {', '.join(part.file_name for part in missing)}")
    unpack(directory, manifest, site)
    _settle(site)
    marker.write_bytes(manifest.encode())
    print(f"install: {manifest.bundle} is in {site}; next: . {shlex.quote(str(site / 'activate'))}")
    return 0


def _settle(site: Path) -> None:
    """Write what names this tree, this directory or this Python: any of them may have moved."""
    for script in sorted((site / "bin").glob("*")):
        _point_at_this_python(script)
    write_entry_points(site, TREE)
    (site / "activate").write_text(activation(site, TREE, ENVIRONMENT))


def unpack(directory: Path, manifest: parts.BundleManifest, site: Path) -> None:
    """Make `site` from the whole parts; a run that was cut short leaves no `site`."""
    partial = site.with_name(f"{site.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (
        io.BufferedReader(parts.PartReader(directory, manifest)) as file,
        lzma.LZMAFile(file) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        archive.extractall(partial, filter="data")
    if site.exists():
        site.rmdir()
    partial.rename(site)


def activation(site: Path, tree: Path, environment: Mapping[str, str]) -> str:
    """Shell lines to source: the packages first, then RoseMux's tree, then what was set before."""
    search = shlex.quote(f"{site}:{tree}")
    lines = [f"export PYTHONPATH={search}${{PYTHONPATH:+:$PYTHONPATH}}"]
    lines.append(f'export PATH={shlex.quote(str(site / "bin"))}:"$PATH"')
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join(lines) + "\n"


def write_entry_points(site: Path, tree: Path) -> None:
    """Write what an installed RoseMux would say of itself: its version and its entry points.

    A tree on PYTHONPATH alone has no metadata, and vLLM finds its plugins by metadata.
    """
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("deploy/gpu/install\n")
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    for script, value in groups["console_scripts"].items():
        module, _, function = value.partition(":")
        path = site / "bin" / script
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"#!{sys.executable}\nimport sys\n\nfrom {module} import {function}\n\n"
            f"sys.exit({function}())\n"
        )
        path.chmod(0o755)


def _point_at_this_python(script: Path) -> None:
    """Replace the interpreter of the machine that packed."""
    first, newline, rest = script.read_bytes().partition(b"\n")
    if first.startswith(b"#!") and b"python" in first:
        script.write_bytes(f"#!{sys.executable}".encode() + newline + rest)


if __name__ == "__main__":
    sys.exit(main())
