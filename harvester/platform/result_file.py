"""Files that a command leaves for people: known to be writable before the work, whole after it."""

import tempfile
from pathlib import Path

from harvester.contracts.errors import ConfigError
from harvester.platform import whole_file


def make_writable(path: Path) -> None:
    """Make the folder of `path`. Raises ConfigError where a file could not be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # What stands there stays until there is something to put in its place.
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Replaces the file only once the text is whole. Raises ConfigError where it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole_file.replace(path, text.encode(), mode=0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
