from collections.abc import Callable

from benchmarks.testbed.latencies import itl_of, ttft_of
from benchmarks.testbed.production_request import ProductionRequest


def test_each_latency_keeps_its_round_and_failed_requests_have_none(
    request_of: Callable[..., ProductionRequest],
) -> None:
    seen = [
        request_of(block=2, ttft_s=0.1, itl_s=(0.01, 0.02)),
        request_of(block=0, ttft_s=None, itl_s=()),
        request_of(block=0, ttft_s=0.2, itl_s=(0.03,)),
        request_of(block=1, ttft_s=9.0, itl_s=(9.0,), failed=True),
    ]
    ttft, itl = ttft_of(seen), itl_of(seen)
    assert list(zip(ttft.rounds, ttft.values_s, strict=True)) == [(2, 0.1), (0, 0.2)]
    assert list(zip(itl.rounds, itl.values_s, strict=True)) == [(2, 0.01), (2, 0.02), (0, 0.03)]
    assert ttft.percentile_s(100) == 0.2
    assert ttft_of(seen[3:]).percentile_s(50) is None
