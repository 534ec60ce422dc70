"""vLLM's metrics page, narrowed to what the agent asks for, as a faulty server may send it."""

_SERIES = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {kv}
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {tokens}
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
"""
HUGE_BYTES = 100 << 20
VIRTUAL_HUGE_BYTES = (1 << 20) + 1
"""The least that is too much."""


def metrics_page(mood: str, *, running: int, tokens: int) -> bytes:
    """`mood`: good (or frozen, by the same tokens again), nan, negative, empty, truncated, huge."""
    kv = {"nan": "NaN", "negative": "-1"}.get(mood, "0.1")
    page = _SERIES.format(running=running, waiting=0, kv=kv, tokens=tokens).encode()
    if mood == "empty":
        return b""
    if mood == "truncated":
        return page[: len(page) // 2]
    if mood == "huge":
        return page + b"#" * (VIRTUAL_HUGE_BYTES - len(page))
    return page
