"""Processor time of an engine."""

from scheduler.demo.processes import Child


def core_s(engine: Child) -> float:
    """Seconds that all of its processes ran on any core, since each of them started."""
    times = [process.cpu_times() for process in engine.tree()]
    return sum(time.user + time.system for time in times)
