"""The installed distribution's version, as commands and metrics tell it."""

from importlib import metadata


def rosemux_version() -> str:
    """`0+tree` where RoseMux runs from a source tree that is not installed."""
    try:
        return metadata.version("rosemux")
    except metadata.PackageNotFoundError:
        return "0+tree"
