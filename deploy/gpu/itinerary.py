"""The goes that bring a bundle over, and the commands of each, as text."""

import shlex
from pathlib import Path

from deploy.gpu.parts import MANIFEST, BundleManifest

PARTS = "/tmp/rosemux-parts"
SITE = "/tmp/rosemux-site"
KVCACHED = "/tmp/rosemux-kvcached"
ROSEMUX = "rosemux"
"""The bundle without vLLM."""


def text(folder: Path, manifest: BundleManifest, tree: Path) -> str:
    """One part a go: a part is as large as what travels at once."""
    shown = folder.relative_to(tree) if folder.is_relative_to(tree) else folder
    total = sum(part.size_bytes for part in manifest.parts)
    count = len(manifest.parts)
    lines = [f"{manifest.bundle}: {total / 2**20:.1f} MiB in {count} part(s), as many goes"]
    bundle = shlex.quote(str(shown))
    for part in manifest.parts:
        lines += [
            f"go {part.index}: carry {shown / MANIFEST} and {shown / part.file_name}; there:",
            f"    deploy/gpu/join {bundle} {PARTS}",
        ]
    check = "deploy/gpu/check"
    if manifest.bundle == ROSEMUX:
        check += f" --only {ROSEMUX}"
    lines += [
        "in the last go, after its join:",
        f"    deploy/gpu/install {PARTS} {SITE} && . {SITE}/activate && {check}",
    ]
    if manifest.bundle != ROSEMUX:
        lines += [
            "for kvcached, after that:",
            f"    deploy/gpu/build-kvcached {SITE} {KVCACHED} && . {KVCACHED}/activate",
        ]
    return "\n".join(lines)
