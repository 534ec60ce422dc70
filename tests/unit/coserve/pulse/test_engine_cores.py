"""Engine cores that step side by side, reported by one API server of several."""

from coserve.pulse.engine_cores import CoreTable, EngineStep

MS = 1_000_000


def step(
    cores: CoreTable, rank: int, now_ns: int, *, ours: int | None = None, kv: float | None = None
) -> int:
    running = None if kv is None else 1
    told = EngineStep(
        rank=rank,
        running=running,
        kv_usage_ratio=kv,
        ours=ours is not None,
        inter_token_s=(0.01,) * (ours or 0),
    )
    return cores.step(told, now_ns=now_ns)


def test_each_core_has_a_last_step_of_its_own() -> None:
    cores = CoreTable()
    assert step(cores, 0, 10 * MS) == 0
    assert step(cores, 1, 12 * MS) == 0
    assert step(cores, 0, 15 * MS) == 10 * MS
    assert step(cores, 1, 19 * MS) == 12 * MS


def test_the_decode_that_waits_longest_is_that_of_the_core_that_stepped_first() -> None:
    cores = CoreTable()
    step(cores, 0, 10 * MS, ours=1)
    step(cores, 1, 15 * MS, ours=1)
    assert cores.last_step_ns(decoding=2, now_ns=16 * MS) == 10 * MS
    step(cores, 0, 20 * MS, ours=1)
    assert cores.last_step_ns(decoding=2, now_ns=21 * MS) == 15 * MS


def test_a_core_without_requests_of_ours_delays_none() -> None:
    cores = CoreTable()
    step(cores, 0, 10 * MS, ours=0)
    step(cores, 1, 15 * MS, ours=1)
    assert cores.last_step_ns(decoding=1, now_ns=16 * MS) == 15 * MS
    assert cores.last_step_ns(decoding=0, now_ns=16 * MS) == 15 * MS, "of all"


def test_a_request_that_went_away_on_a_core_that_rests_is_forgotten_after_a_while() -> None:
    cores = CoreTable()
    step(cores, 0, 10 * MS, ours=1)
    step(cores, 1, 15 * MS, ours=1)
    assert cores.last_step_ns(decoding=1, now_ns=16 * MS) == 10 * MS, "which is not known yet"
    step(cores, 1, 2000 * MS, ours=1)
    assert cores.last_step_ns(decoding=1, now_ns=2001 * MS) == 2000 * MS
    assert cores.last_step_ns(decoding=2, now_ns=2001 * MS) == 10 * MS, "both are there: it hangs"


def test_levels_are_the_last_reported_of_each_core() -> None:
    cores = CoreTable()
    step(cores, 0, 10 * MS, kv=0.9)
    step(cores, 1, 11 * MS, kv=0.3)
    step(cores, 0, 12 * MS, kv=0.2)
    step(cores, 1, 13 * MS)
    assert (cores.running, cores.kv_usage_ratio) == (2, 0.3)
    assert [(core.rank, core.told_ns) for core in cores.reported] == [(0, 12 * MS), (1, 11 * MS)]


def test_the_fullest_of_very_many_cores_are_reported() -> None:
    cores = CoreTable()
    for rank in range(64):
        step(cores, rank, MS, kv=rank / 64)
    assert [core.rank for core in cores.reported] == list(range(63, 47, -1))
