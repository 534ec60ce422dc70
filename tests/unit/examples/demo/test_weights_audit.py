"""Reports of engines about their weights, against a store with real publishes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
import torch

from examples.demo.weights_audit import WeightsAudit
from weightsync.encoding.codec import Encoding
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Published, Publisher

ENGINES = {"guest-0": "http://guest", "dedicated-0": "http://dedicated"}


@dataclass(slots=True)
class Engines:
    """Stands for aiohttp's session: each URL's report, or None without an answer."""

    reports: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    @asynccontextmanager
    async def post(self, url: str, *, json: Any, timeout: Any) -> AsyncIterator[Any]:
        assert json == {"method": "rosemux_weights"}
        report = self.reports[url.removesuffix("/collective_rpc")]
        if report is None:
            raise aiohttp.ClientConnectionError("nobody there")

        async def answer() -> dict[str, Any]:
            return {"results": [report]}

        yield SimpleNamespace(json=answer)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def published(root: Path) -> list[Published]:
    """Two versions of one job."""
    with Publisher(
        root / "job", versions=VersionSettings(encoding=Encoding.OVERWRITE)
    ) as publisher:
        return [publisher.publish({"w": torch.full((8,), float(step))}) for step in (1, 2)]


def report(published: Published, **changed: Any) -> dict[str, Any]:
    held = {"store": "job", "version": published.version, "state_hash": published.state_hash}
    return {**held, "reapplied": 0, **changed}


async def audited(root: Path, *rounds: dict[str, dict[str, Any] | None]) -> WeightsAudit:
    engines = Engines()
    audit = WeightsAudit(cast(Any, engines), ENGINES, root)
    for reports in rounds:
        engines.reports = {url: reports.get(name) for name, url in ENGINES.items()}
        await audit.run()
    return audit


async def test_engines_that_hold_what_was_published_do_not_mismatch(
    root: Path, published: list[Published]
) -> None:
    old, new = published
    audit = await audited(root, {"guest-0": report(old), "dedicated-0": report(new)})
    assert (audit.audited, audit.hash_mismatches) == (2, 0)


async def test_another_state_than_the_published_one_is_a_mismatch_each_time(
    root: Path, published: list[Published]
) -> None:
    old, new = published
    wrong = report(new, state_hash=old.state_hash)
    audit = await audited(root, {"guest-0": wrong, "dedicated-0": report(new)}, {"guest-0": wrong})
    assert (audit.audited, audit.hash_mismatches) == (3, 2)


async def test_an_unpublished_version_is_a_mismatch(root: Path, published: list[Published]) -> None:
    audit = await audited(root, {"guest-0": report(published[0], version=9)})
    assert audit.hash_mismatches == 1


@pytest.mark.parametrize("store", ["stranger", "../weights"])
async def test_a_missing_store_is_a_mismatch(
    root: Path, published: list[Published], store: str
) -> None:
    audit = await audited(root, {"guest-0": report(published[0], store=store)})
    assert audit.hash_mismatches == 1


async def test_a_repair_by_the_engine_counts_once(root: Path, published: list[Published]) -> None:
    mended = {"guest-0": report(published[1], reapplied=1)}
    assert (await audited(root, mended, mended)).hash_mismatches == 1


async def test_engines_that_hold_nothing_or_are_away_are_not_counted(
    root: Path, published: list[Published]
) -> None:
    audit = await audited(root, {"guest-0": {}, "dedicated-0": None})
    assert audit.audited == 0
    assert audit.hash_mismatches is None, "nothing was measured"
