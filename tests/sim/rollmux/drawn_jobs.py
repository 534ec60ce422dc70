"""Numbers of a drawn workload, to compare two."""

from scheduler.sim.rollmux.workload import SimulatedJob


def as_numbers(jobs: list[SimulatedJob]) -> list[tuple[str, float, bytes]]:
    return [(one.job.job, one.arrival_s, one.lengths_s.tobytes()) for one in jobs]
