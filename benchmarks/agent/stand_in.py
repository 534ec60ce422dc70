"""Production's or a guest's stand-in, as a process: `stand_in production|guest PAGES LOG`.

It writes its page every 50 ms, notes in LOG what it did and what befell it, and obeys one word a
line on its standard input: `end`, `silent`, `hung`, `back`, `restarted`, `torn`, `kv_full`, `owe`,
`blame PID`, or a mood of its metrics page. `production` serves that page at `--metrics PORT`.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.agent.metrics_page import HUGE_BYTES, metrics_page
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import Guest, PageDirectory, Pulse
from harvester.contracts.process import process_ids
from harvester.platform.parent import end_with

BEAT_S = 0.05
PULSE_TTL_S = 0.3
GUEST_KV_TOKENS = 4096
_MOODS = ("good", "frozen", "nan", "negative", "empty", "truncated", "huge", "half_open")
_SIGNALS = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
_PART_BYTES = 1 << 20
_RESTART_TOKENS = 10_000
"""A restarted engine has counted fewer."""


class StandIn:
    def __init__(self, log: Path) -> None:
        self._log = log.open("a", buffering=1)
        self._noting = threading.Lock()
        self.words: dict[str, str] = {}
        self.ended = threading.Event()
        self.mood = "good"
        self.tokens = 10_000_000

    def note(self, **facts: Any) -> None:
        with self._noting:
            self._log.write(json.dumps(facts) + "\n")

    def note_signals(self) -> None:
        """Every signal but those that no process can see, with its sender."""
        while True:
            found = signal.sigwaitinfo(_SIGNALS)
            self.note(signal=found.si_signo, sender=found.si_pid)

    def obey(self) -> None:
        for line in sys.stdin:
            word, _, argument = line.strip().partition(" ")
            if word in _MOODS:
                self.mood = word
            elif word == "back":
                self.words.clear()
            elif word == "restarted":
                self.tokens -= _RESTART_TOKENS
                self.words[word] = ""
            elif word == "end":
                break
            else:
                self.words[word] = argument
        self.ended.set()

    def write_pulses(self, pages: PageDirectory) -> None:
        page, step = pages.pulse_writer("prod", 0), 0
        samples = 1000
        while not self.ended.wait(BEAT_S):
            if "restarted" in self.words:
                del self.words["restarted"]
                step = samples = 0
            if "torn" in self.words:
                page.path.write_bytes(os.urandom(600))
                self.words["silent"] = self.words.pop("torn")
            if "silent" in self.words:
                continue
            step += "hung" not in self.words
            samples = min(1000, samples + 10)
            pulse = Pulse(
                in_flight=2 if "hung" in self.words else 0,
                steps_total=step,
                model_samples=samples,
                kv_usage_ratio=0.97 if "kv_full" in self.words else 0.1,
                middleware=True,
                root=process_ids([os.getpid()])[0],
            )
            waits, begin_ns, busy_ns = _waits(), monotonic_ns(), _core_ns()
            page.write(pulse, now_ns=begin_ns, ttl_ns=round(PULSE_TTL_S * 1e9))
            blocked_ns = max(0, monotonic_ns() - begin_ns - (_core_ns() - busy_ns))
            # Time that a hypervisor takes is in no account of the thread's, and no wait either.
            blocked_s = blocked_ns * 1e-9 if _waits() > waits else 0.0
            self.note(pulse=begin_ns * 1e-9, blocked_s=blocked_s)

    def write_guests(self, pages: PageDirectory) -> None:
        page, step = pages.guest_writer(), 0
        own = process_ids([os.getpid()])
        while not self.ended.wait(BEAT_S):
            if "silent" in self.words:
                continue
            step += 1
            blamed = self.words.get("blame", "")
            guest = Guest(
                steps_finished=step,
                kv_tokens=GUEST_KV_TOKENS,
                kv_tokens_total=GUEST_KV_TOKENS,
                kv_tokens_withheld=0 if "owe" in self.words else GUEST_KV_TOKENS,
                processes=process_ids([int(blamed)]) if blamed else own,
            )
            page.write(guest, now_ns=monotonic_ns(), ttl_ns=round(PULSE_TTL_S * 1e9))

    async def serve_metrics(self, port: int) -> None:
        open_now = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal open_now
            open_now += 1
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    self.note(connections=open_now)
                    await self._answer(writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                open_now -= 1
                writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
            await server.serve_forever()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        mood = self.mood
        self.tokens += 0 if mood == "frozen" else 50
        body = metrics_page(mood, running=2, tokens=self.tokens)
        length = HUGE_BYTES if mood == "huge" else len(body)
        if mood == "half_open":
            return
        if mood == "truncated":
            length *= 2
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\r\n"
        at_s = monotonic_ns() * 1e-9
        writer.write(head.encode() + body)
        sent = len(body)
        while mood == "huge" and sent < HUGE_BYTES:
            writer.write(b"#" * _PART_BYTES)
            await writer.drain()
            sent += _PART_BYTES
        await writer.drain()
        self.note(answer=at_s, good=mood in ("good", "frozen"), bytes=len(head) + sent)
        if mood == "truncated":
            raise ConnectionAbortedError


def _waits() -> int:
    """How often this thread gave its core up by itself, to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _core_ns() -> int:
    """Time in which this thread ran or waited for a core."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(ran) + int(waited)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.agent.stand_in", description=__doc__)
    parser.add_argument("role", choices=("production", "guest"))
    parser.add_argument("pages", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--metrics", type=int, help="port of the metrics page, instead of a pulse")
    given = parser.parse_args()
    # Before any thread is started, which all inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    end_with(os.getppid())
    stand_in, pages = StandIn(given.log), PageDirectory(given.pages)
    for work in (stand_in.note_signals, stand_in.obey):
        threading.Thread(target=work, daemon=True).start()
    if given.metrics is not None:
        serving = stand_in.serve_metrics(given.metrics)
        threading.Thread(target=lambda: asyncio.run(serving), daemon=True).start()
        stand_in.ended.wait()
    elif given.role == "production":
        stand_in.write_pulses(pages)
    else:
        stand_in.write_guests(pages)
    # Daemon threads may be in the middle of a line.
    os._exit(0)


if __name__ == "__main__":
    main()
