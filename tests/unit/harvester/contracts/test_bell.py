"""A sleeper wakes when another process, or another thread, writes a word that it sleeps on."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.contracts import bell
from harvester.contracts.bell import PrivateBell, Word, sleep_until_rung
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import PageDirectory, Pulse, pulse_page

# Far beyond any machine's noise: a sleep that took this long was not woken.
LONG_S = 30.0
WRITER = """
import sys, time
from pathlib import Path
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import PageDirectory, Pulse
writer = PageDirectory(Path(sys.argv[1])).pulse_writer("prod", 0)
while True:
    time.sleep(0.3)
    writer.write(Pulse(), now_ns=monotonic_ns(), ttl_ns=10**10)
"""


def slept_s(*words: Word, timeout_s: float = LONG_S) -> float:
    start_ns = monotonic_ns()
    sleep_until_rung(words, timeout_s=timeout_s)
    return (monotonic_ns() - start_ns) * 1e-9


@pytest.fixture
def still(tmp_path: Path) -> Iterator[Word]:
    """The futex word of a page that is no longer written."""
    directory = PageDirectory.create(tmp_path)
    writer = directory.pulse_writer("still", 0)
    writer.write(Pulse(), now_ns=monotonic_ns(), ttl_ns=10**10)
    reader = directory.pulse_reader(pulse_page("still", 0))
    reader.read()
    word = reader.peek()
    assert word is not None
    yield word
    reader.close()
    writer.close()


def test_a_write_of_another_process_wakes_a_reader_without_write_access(
    tmp_path: Path, still: Word
) -> None:
    reader = PageDirectory(tmp_path).pulse_reader(pulse_page("prod", 0))
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    try:
        until_ns = monotonic_ns() + int(LONG_S * 1e9)
        while reader.read().record is None and monotonic_ns() < until_ns:
            time.sleep(0.01)
        for _ in range(3):
            word = reader.peek()
            assert word is not None
            while reader.peek() == word:
                assert slept_s(still, word) < LONG_S / 2
    finally:
        process.kill()
        process.wait()
        reader.close()


def test_a_word_that_has_changed_is_not_slept_on(still: Word) -> None:
    assert slept_s(Word(still.address, still.value + 2)) < LONG_S / 2


def test_a_private_bell_wakes_a_thread_of_this_process(still: Word) -> None:
    private = PrivateBell()
    word = private.word()
    timer = threading.Timer(0.2, private.ring)
    timer.start()
    while private.word() == word:
        assert slept_s(still, word) < LONG_S / 2
    timer.join()


def test_nothing_rung_ends_at_its_time(still: Word) -> None:
    assert slept_s(still, timeout_s=0.05) < LONG_S / 2
    assert slept_s(timeout_s=0.05) < LONG_S / 2


def test_a_page_that_is_unmapped_meanwhile_is_no_error() -> None:
    assert slept_s(Word(4096, 0), timeout_s=0.05) < LONG_S / 2


def test_where_the_kernel_cannot_a_sleep_is_a_nap(
    still: Word, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bell, "_call", None)
    assert slept_s(still) < LONG_S / 2
    bell.ring(still.address)
