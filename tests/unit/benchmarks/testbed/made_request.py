"""A request to production that never ran, for the tests of test bed and demo."""

from benchmarks.testbed.production_request import ProductionRequest


def made_request(arm: str = "serving_only", **given: object) -> ProductionRequest:
    fields: dict[str, object] = {
        "arm": arm,
        "block": 0,
        "due_s": 0.0,
        "input_tokens": 8,
        "output_tokens": 3,
        "ttft_s": 0.02,
        "itl_s": (0.01, 0.01),
        "failed": False,
        "trace_index": 0,
    }
    return ProductionRequest(**(fields | given))  # type: ignore[arg-type]
