import re
from collections.abc import Callable
from pathlib import Path

import pytest

Table = list[list[str]]
_ROW = re.compile(r"\|(.+)\|")


@pytest.fixture
def repository() -> Path:
    return Path(__file__).parents[3]


@pytest.fixture
def text_of(repository: Path) -> Callable[[str], str]:
    """The text of a page, or of all pages of a folder, one after another."""

    def read(page: str) -> str:
        found = repository / page
        pages = sorted(found.rglob("*.md")) if found.is_dir() else [found]
        return "\n".join(each.read_text() for each in pages)

    return read


@pytest.fixture
def tables_after(text_of: Callable[[str], str]) -> Callable[[str, str], list[Table]]:
    """Cells of the first table behind each place of a mark in a page, or in the pages of a folder,
    without its head and without backticks."""

    def read(page: str, mark: str) -> list[Table]:
        return [_first_table(mark + rest) for rest in text_of(page).split(mark)[1:]]

    return read


def _first_table(text: str) -> Table:
    rows: Table = []
    for line in text.splitlines():
        found = _ROW.fullmatch(line)
        if found:
            rows.append([cell.strip().replace("`", "") for cell in found[1].split("|")])
        elif rows:
            break
    assert len(rows) > 2, f"no table in {text[:80]!r}"
    return rows[2:]


@pytest.fixture
def table_after(tables_after: Callable[[str, str], list[Table]]) -> Callable[[str, str], Table]:
    """As `tables_after`, of a mark that stands once."""

    def read(page: str, mark: str) -> Table:
        found = tables_after(page, mark)
        assert len(found) == 1, f"{mark!r} stands {len(found)} times in {page}"
        return found[0]

    return read


@pytest.fixture
def retired_in_prose(repository: Path) -> re.Pattern[str]:
    """Words that the glossary keeps out of sentences."""
    page = (repository / "docs/glossary.md").read_text()
    paragraph = page[page.index("Nor do `") :].partition("\n\n")[0]
    words = re.findall("`([a-z]+)`", paragraph)
    assert len(words) > 10, "the list of words was not found"
    return re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)
