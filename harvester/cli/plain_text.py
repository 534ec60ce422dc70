"""Words of other processes, which shall neither command a terminal nor add a line to it."""

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """The text on one line, a blank for each control character."""
    return _CONTROL.sub(" ", text)
