"""The code blocks of docs/install.md and docs/operations.md by their headings."""

import re
from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"
PAGES = (_DOCS / "install.md", _DOCS / "operations.md")


def block(heading: str, number: int = 0, *, text: str | None = None) -> str:
    """The `number`th fenced block below a heading. Raises LookupError where there is none."""
    page = "\n".join(each.read_text() for each in PAGES) if text is None else text
    sections = re.split(r"(?m)^#+ (.*)$", page)
    bodies = dict(zip(sections[1::2], sections[2::2], strict=True))
    if heading not in bodies:
        raise LookupError(f"no page has the heading {heading!r}")
    blocks = re.findall(r"(?ms)^ *```\w*\n(.*?)^ *```$", bodies[heading])
    if number >= len(blocks):
        raise LookupError(f"{heading!r} has {len(blocks)} blocks, not {number + 1}")
    return str(blocks[number])
