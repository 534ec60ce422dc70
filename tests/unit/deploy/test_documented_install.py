"""The blocks of the pages that `make installation` runs, and how it finds them."""

import re

import pytest

from deploy.check_expressions import DEPLOY
from tests.install.page import PAGES, block

RUN = (("Install on a node", 0), ("Production's command", 0), ("Production's command", 1))
RUN += (("Start a guest", 0), ("Undo", 0))


@pytest.mark.parametrize(("heading", "number"), RUN)
def test_each_block_that_is_run_is_there(heading: str, number: int) -> None:
    assert block(heading, number).strip()


def test_a_heading_or_a_block_that_is_gone_is_an_error() -> None:
    text = "## A\n```\none\n```\n  ```yaml\n  two\n  ```\n## B\n"
    assert block("A", text=text) == "one\n"
    assert block("A", 1, text=text) == "  two\n"
    for heading, number in (("A", 2), ("B", 0), ("C", 0)):
        with pytest.raises(LookupError):
            block(heading, number, text=text)


def test_the_units_start_what_the_page_installs() -> None:
    installed = re.findall(r"(\S+)/bin/rosemux /usr/local", block("Install on a node"))
    for unit in ("rosemux-agent.service", "rosemux-guest@.service"):
        text = (DEPLOY / "systemd" / unit).read_text()
        assert re.findall(r"ExecStart=(\S+)/bin/rosemux", text) == installed


def test_production_s_command_stands_in_one_place() -> None:
    root = DEPLOY.parent
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "examples").glob("*.md")]
    holders = tuple(page for page in pages if "middleware.PulseMiddleware" in page.read_text())
    assert holders == PAGES[:1]
    assert PAGES[0].read_text().count("middleware.PulseMiddleware") == 1
    assert PAGES[0].read_text().count("ROSEMUX_ROLE=production") == 1
