"""A wheel's name, version and requirements, read from its metadata without installing it."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, parse_wheel_filename
from packaging.version import Version

METADATA_LIMIT_BYTES = 4 << 20


class CarryError(Exception):
    """A carry cannot be packed as asked; the message says why."""


@dataclass(frozen=True, slots=True)
class Wheel:
    path: Path
    name: NormalizedName
    version: Version
    requires: tuple[Requirement, ...] = ()


def read_wheel(path: Path) -> Wheel:
    """Raises CarryError if the file is no wheel or its metadata is unreadable."""
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            (entry,) = [
                member
                for member in archive.infolist()
                if member.filename.count("/") == 1
                and member.filename.endswith(".dist-info/METADATA")
            ]
            if entry.file_size > METADATA_LIMIT_BYTES:
                raise CarryError(f"{path.name}: metadata of {entry.file_size} bytes")
            metadata = Metadata.from_email(archive.read(entry), validate=False)
    except (ValueError, OSError, zipfile.BadZipFile, ExceptionGroup) as error:
        raise CarryError(f"{path.name} is not a readable wheel: {error}") from error
    return Wheel(path, name, version, tuple(metadata.requires_dist or ()))
