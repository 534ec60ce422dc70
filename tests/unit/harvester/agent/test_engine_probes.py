import asyncio
from pathlib import Path

import aiohttp
import pytest

from harvester.agent.engine_probes import GuestDescription, MetricsProbe, read_metrics
from harvester.contracts.page import PageDirectory
from harvester.policy.sample import SCRAPED_PULSE

PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 40.0
"""


@pytest.mark.parametrize("page", [PAGE, PAGE.replace("vllm:", "vllm_")])
def test_reads_both_spellings(page: str) -> None:
    levels = read_metrics(page)
    assert levels is not None
    assert (levels.running, levels.waiting, levels.kv_usage_ratio) == (4.0, 2.0, 0.5)
    assert (levels.prompt_tokens_total, levels.generation_tokens_total) == (100.0, 40.0)


SGLANG_PAGE = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 4.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.5
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 100.0
sglang:generation_tokens_total{model_name="m"} 40.0
sglang:cache_hit_rate{model_name="m"} 0.1
"""


def test_sglang_s_levels_are_the_same_by_other_names() -> None:
    assert read_metrics(SGLANG_PAGE) == read_metrics(PAGE)


def test_a_page_of_two_kinds_of_engine_is_unknown() -> None:
    assert read_metrics(PAGE + SGLANG_PAGE) is None
    assert read_metrics(SGLANG_PAGE + PAGE) is None


@pytest.mark.parametrize("series", ["num_running_reqs", "num_queue_reqs", "token_usage"])
def test_a_missing_series_of_sglang_is_unknown_and_not_idle(series: str) -> None:
    page = "\n".join(line for line in SGLANG_PAGE.splitlines() if series not in line)
    assert read_metrics(page) is None


@pytest.mark.parametrize("series", ["num_requests_running", "kv_cache_usage_perc"])
def test_a_missing_series_is_unknown_and_not_idle(series: str) -> None:
    page = "\n".join(line for line in PAGE.splitlines() if series not in line)
    assert read_metrics(page) is None


@pytest.mark.parametrize("level", ["} 2.0", "} 0.25", "} 0.5", "} 100.0"])
@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e30"])
def test_an_invalid_level_is_unknown(level: str, value: str) -> None:
    """Also of one engine beside a good one: the maximum of NaN and a number is the number."""
    assert read_metrics(PAGE.replace(level, f"}} {value}")) is None


@pytest.mark.parametrize("page", ["", "<html>", PAGE[: len(PAGE) // 2]])
def test_an_invalid_metrics_page_is_unknown(page: str) -> None:
    assert read_metrics(page) is None


async def test_an_error_that_was_not_foreseen_ends_no_probe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    async def ask(_: aiohttp.ClientSession) -> None:
        nonlocal asked
        asked += 1
        raise OverflowError if asked < 3 else asyncio.CancelledError

    monkeypatch.setattr("harvester.agent.engine_probes._DESCRIPTION_S", 0.001)
    probe = GuestDescription(lambda: "")
    monkeypatch.setattr(probe, "ask", ask)
    with pytest.raises(asyncio.CancelledError):
        await probe.run()
    assert len([one for one in caplog.records if one.exc_info]) == 2


async def test_a_probe_that_ends_leaves_no_pulse_that_would_be_awaited(tmp_path: Path) -> None:
    pages = PageDirectory.create(tmp_path / "slot0")
    probe = MetricsProbe("http://127.0.0.1:9/metrics", pages=pages.path)
    levels = read_metrics(PAGE)
    assert levels is not None
    probe._write(levels)
    assert pages.pulse_names() == (SCRAPED_PULSE,)
    running = asyncio.create_task(probe.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not pages.pulse_names()
