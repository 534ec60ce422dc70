"""The form of a service's log lines, on a terminal and in systemd's journal."""

import subprocess
import sys

import pytest

WARN = (
    "import logging; from harvester.platform.logs import begin_log; begin_log();"
    "logging.getLogger('a.b').warning('two\\nlines'); logging.getLogger('a').info('one')"
)


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({"JOURNAL_STREAM": "8:1"}, ["<4>WARNING a.b: two", "<4>lines", "<6>INFO a: one"]),
        ({}, ["WARNING a.b: two", "lines", "INFO a: one"]),
    ],
)
def test_journald_gets_priorities_and_no_second_time(
    environment: dict[str, str], lines: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WARN], capture_output=True, text=True, check=True, env=environment
    )
    found = done.stderr.splitlines()
    if not environment:
        assert all(line[:4].isdigit() for line in found if "lines" not in line)
        found = [line if line == "lines" else line.split(" ", 2)[2] for line in found]
    assert found == lines
