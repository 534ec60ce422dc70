"""Inputs of a client's driver, and the facts that it reports; runs in the client's environment.

Imports nothing but the standard library: no module of ours may change what a client does. A driver
asserts what only it can see, and prints one line of JSON; the harness holds the facts to what the
gateway counted.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

URL = os.environ.get("ROSEMUX_URL", "")
"""The gateway's."""
MODEL = Path(os.environ.get("ROSEMUX_MODEL", ""))
"""Directory of the model's configuration, initial weights and tokenizer."""
STORE = Path(os.environ.get("ROSEMUX_STORE", ""))
"""The job's weight store; version 1 is the model's initial weights."""
JOB = os.environ.get("ROSEMUX_JOB", "")


class Facts:
    def __init__(self) -> None:
        self._turns = 0
        self._tokens = 0
        self._logprobs = 0
        self._versions: set[int] = set()

    def turn(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[float] | None,
        *,
        versions: Iterable[int | str] = (),
    ) -> None:
        """One sampled turn. `logprobs` is None where the client's dialect has no place for them."""
        assert token_ids, "a turn without tokens"
        self._turns += 1
        self._tokens += len(token_ids)
        self._versions.update(int(version) for version in versions)
        if logprobs is None:
            return
        values = list(logprobs)
        assert len(values) == len(token_ids), (len(values), len(token_ids))
        assert all(math.isfinite(value) and value <= 0.0 for value in values), values
        self._logprobs += len(values)

    def report(self, **notes: Any) -> None:
        """`notes`: what else a reader of the run wants to know. `whole=False`: the client sampled
        more than it counted here."""
        whole = notes.pop("whole", True)
        facts = {
            "turns": self._turns,
            "tokens": self._tokens,
            "logprobs": self._logprobs,
            "versions": sorted(self._versions),
            "whole": whole,
            "notes": notes,
        }
        print(json.dumps(facts), flush=True)
