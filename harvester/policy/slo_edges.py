"""Warns of an SLO that dashboards cannot count, or that is probably not in seconds.

It is only ever a warning. RoseMux judges from raw samples and reads no histogram, at no level of
consent. Dashboards of production's SLO do, and between two edges of a histogram they can only
interpolate.
"""

from collections.abc import Iterator
from itertools import pairwise

TTFT_EDGES_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_EDGES_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
"""vLLM's, unless it was started with `--custom-histogram-buckets`."""

# Above these an SLO was probably meant in milliseconds: no service allows so long for a first
# token, or between two.
TTFT_PLAUSIBLE_S = 30.0
ITL_PLAUSIBLE_S = 2.0


def slo_warnings(*, ttft_slo_s: float, itl_slo_s: float) -> Iterator[tuple[str, str]]:
    """Yields each odd setting's name and the warning."""
    for name, slo_s, plausible_s, edges_s in (
        ("ttft_slo_s", ttft_slo_s, TTFT_PLAUSIBLE_S, TTFT_EDGES_S),
        ("itl_slo_s", itl_slo_s, ITL_PLAUSIBLE_S, ITL_EDGES_S),
    ):
        if slo_s > plausible_s:
            yield name, f"{slo_s:g} s is long: were {slo_s:g} ms meant, {slo_s / 1000:g}?"
        elif slo_s not in edges_s:
            near = _near(slo_s, edges_s)
            yield name, f"{slo_s:g} is no edge of vLLM's histogram, dashboards interpolate {near}"
    if itl_slo_s > ttft_slo_s:
        yield "itl_slo_s", f"{itl_slo_s:g} s is longer than ttft_slo_s, {ttft_slo_s:g} s"


def _near(slo_s: float, edges_s: tuple[float, ...]) -> str:
    for below, above in pairwise(edges_s):
        if below < slo_s < above:
            return f"between {below:g} and {above:g}"
    return f"below {edges_s[0]:g}" if slo_s < edges_s[0] else f"above {edges_s[-1]:g}"
