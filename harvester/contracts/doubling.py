"""Waits that double with every failed try: one formula for retries, pauses and patience."""

from math import inf

_DOUBLINGS_MAX = 30
"""A higher power of 2.0 is longer than any wait, and overflows in the end."""


def doubled_s(first_s: float, times: int, *, most_s: float = inf) -> float:
    """`first_s` doubled `times` times, at most `most_s`."""
    return min(first_s * 2.0 ** min(times, _DOUBLINGS_MAX), most_s)
