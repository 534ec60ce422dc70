"""A relay between network namespaces: one copy over the link for any number of receivers."""

import os
import subprocess

import pytest

from benchmarks.weightsync.fanout import measure
from harvester.contracts.errors import Unsupported


def test_receivers_behind_a_link_share_one_copy_and_nothing_stays_behind() -> None:
    try:
        figures = measure(receivers=3, mbit=400.0, megabytes=6)
    except Unsupported as reason:
        pytest.skip(str(reason))
    assert figures["receivers"] == 3
    # A small model, so that heads and questions weigh more than in the benchmark itself.
    assert 1.0 <= figures["copies_over_link"] < 1.3
    assert figures["next_version"]["payload_bytes"] < figures["payload_bytes"] / 10
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert f"rmx{os.getpid()}" not in left.stdout
