"""Judges one client's run: the facts that its driver reported against what the gateway counted."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    name: str
    """Driver tests/clients/drive_NAME.py."""
    page: str
    """Its section in examples/clients.md."""
    package: str = ""
    """Pins in deploy/clients/PACKAGE.txt; the client's name where empty."""
    trains: bool = False
    """Publishes versions, at least two of them while it samples."""
    has_logprobs: bool = True
    """Its dialect returns the sampled tokens' log-probabilities."""
    timeout_s: float = 240.0

    @property
    def environment(self) -> str:
        return self.package or self.name

    @property
    def driver(self) -> str:
        return f"drive_{self.name.replace('-', '_')}.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The gateway's counts of a job, up to a moment."""

    turns: int
    dedicated_tokens: int
    guest_tokens: int
    wrong: int
    """Turns lost or ended twice."""
    version: int

    @classmethod
    def of(cls, status: dict[str, Any], job: str) -> "Counted":
        """From the reply of /v1/status."""
        own = status["jobs"][job]
        return cls(
            turns=own["turns"]["started"],
            dedicated_tokens=own["tokens"]["dedicated"],
            guest_tokens=own["tokens"]["guest"],
            wrong=own["turns"]["lost"] + own["turns"]["duplicated"],
            version=own["version"],
        )

    def since(self, before: "Counted") -> "Counted":
        return Counted(
            turns=self.turns - before.turns,
            dedicated_tokens=self.dedicated_tokens - before.dedicated_tokens,
            guest_tokens=self.guest_tokens - before.guest_tokens,
            wrong=self.wrong - before.wrong,
            version=self.version - before.version,
        )


def faults(client: Client, facts: dict[str, Any], counted: Counted) -> list[str]:
    """Each in words; empty where the client works. `counted` is of this client's run alone."""
    served = counted.dedicated_tokens + counted.guest_tokens
    whole = facts["whole"]
    checks = {
        f"{counted.wrong} turns lost or ended twice": counted.wrong == 0,
        "the client got no token": facts["tokens"] > 0,
        "no turn ran on the harvested engine": counted.guest_tokens > 0,
        f"{facts['logprobs']} log-probabilities of {facts['tokens']} tokens": (
            facts["logprobs"] == (facts["tokens"] if client.has_logprobs else 0)
        ),
        f"the client got {facts['turns']} turns, the gateway served {counted.turns}": (
            facts["turns"] == counted.turns if whole else facts["turns"] <= counted.turns
        ),
        f"the client got {facts['tokens']} tokens, the engines made {served}": (
            facts["tokens"] == served if whole else facts["tokens"] <= served
        ),
        f"{counted.version} versions: a client that trains publishes more than one": (
            not client.trains or counted.version > 1
        ),
    }
    return [fault for fault, holds in checks.items() if not holds]
