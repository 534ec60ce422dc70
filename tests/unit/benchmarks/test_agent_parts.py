"""Parts of `benchmarks.agent` without a process: figures, limits, and virtual scenarios."""

from pathlib import Path

import pytest

from benchmarks.agent.cost import loop_times_ms
from benchmarks.agent.evidence import Evidence, GrantSeen, grant_on
from benchmarks.agent.expiries import UNIT, expired, poisson_interval, shipped_limits
from benchmarks.agent.faults import convicted
from benchmarks.agent.hostile import hostile_requests
from benchmarks.agent.judge import INVARIANTS, judged
from benchmarks.agent.metrics_page import metrics_page
from benchmarks.agent.real_faults import STRIKES
from benchmarks.agent.virtual_faults import FAULTS
from benchmarks.agent.virtual_node import VirtualNode
from benchmarks.agent.virtual_scenario import run_in, run_scenario, was_open
from harvester.agent.engine_probes import read_metrics
from harvester.contracts.page import Grant, GrantMode, PageDirectory, PageReader


def _seen(slot: str, at_s: float, *, ttl_s: float = 0.5) -> GrantSeen:
    grant = Grant(epoch=1, mode=GrantMode.OPEN)
    return GrantSeen(slot=slot, stamp_s=at_s, expires_s=at_s + ttl_s, seen_s=at_s, grant=grant)


def test_a_beat_lasts_from_the_first_slot_to_the_last_one_and_its_share_more() -> None:
    grants = [_seen(f"slot{n}", beat + n * 1e-3) for beat in (1.0, 1.1) for n in range(4)]
    assert loop_times_ms(grants, 4) == pytest.approx([4.0, 4.0])
    del grants[2]
    assert loop_times_ms(grants, 4) == pytest.approx([4.0]), "a beat of which a grant was missed"


def test_a_grant_has_expired_if_the_next_one_is_stamped_behind_its_end() -> None:
    assert expired([_seen("s", 1.0), _seen("s", 1.4), _seen("s", 1.95), _seen("s", 2.0)]) == 1


@pytest.mark.parametrize(("count", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572)])
def test_the_interval_of_a_count_is_garwoods(count: int, low: float, high: float) -> None:
    assert poisson_interval(count) == pytest.approx((low, high), abs=2e-3)


def test_limits_are_those_of_the_shipped_unit() -> None:
    share, memory_bytes = shipped_limits(UNIT.read_text())
    assert (share, memory_bytes) == (0.25, 256 << 20)


def test_the_grant_of_an_expired_page_is_read_and_that_of_a_torn_one_is_not(tmp_path: Path) -> None:
    page = PageDirectory(tmp_path).grant_writer()
    page.write(Grant(epoch=5, mode=GrantMode.CLOSED), now_ns=2 * 10**9, ttl_ns=0)
    raw = page.path.read_bytes()
    seen = grant_on(raw, "s", seen_s=3.0)
    assert seen is not None
    assert (seen.grant.epoch, seen.stamp_s, seen.expires_s) == (5, 2.0, 2.0)
    assert grant_on(raw[:60] + b"x" + raw[61:], "s", seen_s=3.0) is None
    assert grant_on(b"", "s", seen_s=3.0) is None


@pytest.mark.parametrize("mood", ["nan", "negative", "empty", "truncated"])
def test_only_a_good_metrics_page_has_levels(mood: str) -> None:
    good = read_metrics(metrics_page("good", running=2, tokens=9).decode())
    assert good is not None
    assert (good.running, good.prompt_tokens_total) == (2, 9)
    assert read_metrics(metrics_page(mood, running=2, tokens=9).decode()) is None


def test_a_run_fails_on_any_violation_and_on_a_fault_that_never_struck() -> None:
    clean = {"violations": dict.fromkeys(INVARIANTS, 0), "unstruck": []}
    assert convicted(clean) == {}
    assert convicted({**clean, "unstruck": ["kill file"]}) == {"unstruck": ["kill file"]}
    assert convicted({**clean, "violations": {"left_behind": 1}}) == {"left_behind": 1}


def test_hostile_requests_and_strikes_have_names_of_their_own() -> None:
    names = [name for name, _ in hostile_requests()]
    assert len(names) == len(set(names)) > 20
    assert len(STRIKES) <= 50, "each strikes at least once in a run"


@pytest.mark.parametrize("seed", range(4))
def test_virtual_scenarios_open_slots_and_violate_nothing(tmp_path: Path, seed: int) -> None:
    evidence, struck = run_in(tmp_path, seed, lasts_s=8.0)
    scraped = seed == 2
    assert bool(evidence.scraped) == scraped
    assert was_open(evidence) != scraped, "a slot with a metrics_url is only observed"
    assert set(struck) <= set(FAULTS)
    assert judged(evidence).notes == []
    assert not list(tmp_path.iterdir())


def test_the_same_seed_gives_the_same_scenario(tmp_path: Path) -> None:
    def shown(evidence: Evidence) -> list[tuple[float, str, int]]:
        return [(seen.stamp_s, seen.grant.reason, seen.grant.epoch) for seen in evidence.grants]

    first, again = (run_in(tmp_path, 7, lasts_s=8.0)[0] for _ in range(2))
    assert shown(first) == shown(again)


def test_an_agent_that_believed_old_pulses_would_be_convicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole chain, with a reader to which no page is ever too old."""
    read = PageReader.read_left
    monkeypatch.setattr(PageReader, "read", lambda self, **_: read(self))

    def stop(node: VirtualNode) -> None:
        for slot in node.slots:
            slot.silent = True

    for name in FAULTS:
        monkeypatch.setitem(FAULTS, name, stop)
    evidence, _ = run_scenario(1, tmp_path / "node", lasts_s=8.0)
    assert judged(evidence).violations["stale_grants"] > 10
