"""Asks every rollout engine which weights it really holds, and holds that against the store.

The engine answers with the hash of its applied state, read back from its own memory; the store's
manifest says what the published state hashes to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from harvester.contracts.errors import RoseMuxError
from harvester.contracts.ids import WeightVersion, checked_name
from weightsync.reading.store import Store

_METHOD = "rosemux_weights"
_TIMEOUT_S = 20.0


@dataclass(slots=True)
class WeightsAudit:
    session: aiohttp.ClientSession
    engines: Mapping[str, str]
    """Name to URL."""
    root: Path
    audited: int = 0
    mismatches: int = 0
    _reapplied: dict[str, int] = field(default_factory=dict)

    @property
    def hash_mismatches(self) -> int | None:
        """States that were not the published one, those mended by the engine included."""
        return self.mismatches + sum(self._reapplied.values()) if self.audited else None

    async def run(self) -> None:
        for name, url in self.engines.items():
            held = await self._held(url)
            if not held:
                continue
            self.audited += 1
            self._reapplied[name] = int(held["reapplied"])
            published = _published(self.root, held["store"], WeightVersion(held["version"]))
            self.mismatches += held["state_hash"] not in published

    async def _held(self, url: str) -> dict[str, Any]:
        """Empty where the engine has loaded nothing yet or does not answer."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        body = {"method": _METHOD}
        try:
            async with self.session.post(
                f"{url}/collective_rpc", json=body, timeout=timeout
            ) as response:
                answer = await response.json()
                held: dict[str, Any] = answer["results"][0]
                return held
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError):
            return {}


def _published(root: Path, name: str, version: WeightVersion) -> set[str]:
    """Hashes under which the version is published; empty if it is not published (any more)."""
    try:
        store = Store(root / checked_name(name, what="store"))
        manifests = [store.manifest(ref) for ref in store.refs() if ref.version == version]
    except RoseMuxError:
        return set()
    return {manifest.section.state_hash for manifest in manifests if manifest.section is not None}
