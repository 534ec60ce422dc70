"""The slow link of a benchmark reports its prerequisites before it makes anything."""

import os
import shutil

import pytest

from benchmarks.weightsync.netns import slow_link
from harvester.contracts.errors import Unsupported


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unsupported, match="needs root"), slow_link(mbit=100):
        pytest.fail("made a link")


def test_without_its_programs_it_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(Unsupported, match="`tc`"), slow_link(mbit=100):
        pytest.fail("made a link")
