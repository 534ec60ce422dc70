"""A workload from a CSV file, one job a line; each fault is reported with its line.

Columns: `job,arrival_s,iterations,roll_s,train_s,phase_cv,roll_max_s,train_max_s,roll_nodes,
train_nodes,host_gb,slo,drift`. Durations are solo means at the job's beginning; `drift` is their
factor at its end.
"""

import csv
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId, TenantId, is_name
from scheduler.model import JobSpec, Pool
from scheduler.rollmux.cluster.job_limits import (
    GB,
    JOB_NODES_MAX,
    SECONDS_MAX,
    SECONDS_MIN,
    SLO_MAX,
)
from scheduler.sim.rollmux.workload import NODE_TYPES, SimulatedJob, drawn_lengths, phases

JOBS_MAX: Final = 100_000
ITERATIONS_MAX: Final = 1_000_000
"""Iterations of all jobs of a file together: each is some ten events in every arm."""
SPAN_MAX_S: Final = 1e8
"""Latest arrival, and longest life of a job alone, in s: a run passes through all of the time."""
_SECONDS: Final = (SECONDS_MIN, SECONDS_MAX)
_RANGES: Final = {
    "arrival_s": (0.0, SPAN_MAX_S),
    "iterations": (1, ITERATIONS_MAX),
    "roll_s": _SECONDS,
    "train_s": _SECONDS,
    "phase_cv": (0.0, 1.0),
    "roll_max_s": _SECONDS,
    "train_max_s": _SECONDS,
    "roll_nodes": (1, JOB_NODES_MAX),
    "train_nodes": (1, JOB_NODES_MAX),
    "host_gb": (0.0, NODE_TYPES[Pool.ROLLOUT].host_bytes / GB),
    "slo": (1.0, SLO_MAX),
    "drift": (0.05, 20.0),
}
COLUMNS: Final = ("job", *_RANGES)
_WHOLE: Final = ("iterations", "roll_nodes", "train_nodes")


def read_workload(path: Path, *, seed: int) -> list[SimulatedJob]:
    """The jobs in the order of their arrivals, with durations drawn from `seed`.

    Raises ConfigError that names the line and the column.
    """
    try:
        # Accepts the byte order mark that spreadsheets put before the first name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, row) for row in islice(reader, JOBS_MAX + 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from error
    if not rows or tuple(name.strip() for name in rows[0][1]) != COLUMNS:
        raise ConfigError(f"{path}: line 1: the columns must be {','.join(COLUMNS)}")
    if len(rows) - 1 > JOBS_MAX:
        raise ConfigError(f"{path}: line {rows[-1][0]}: job is one of more than {JOBS_MAX}")
    seen: dict[str, int] = {}
    iterations = 0
    jobs: list[SimulatedJob] = []
    for line, row in rows[1:]:
        if not row:
            continue
        job = _job(f"{path}: line {line}", row, seed=seed, number=len(jobs))
        if (before := seen.setdefault(job.job.job, line)) != line:
            raise ConfigError(f"{path}: line {line}: job {job.job.job} is on line {before} too")
        iterations += job.iterations
        if iterations > ITERATIONS_MAX:
            words = f"of all jobs so far are {iterations}; the most is {ITERATIONS_MAX}"
            raise ConfigError(f"{path}: line {line}: iterations {words}")
        jobs.append(job)
    if not jobs:
        raise ConfigError(f"{path}: no jobs")
    return sorted(jobs, key=lambda one: one.arrival_s)


def _job(where: str, row: list[str], *, seed: int, number: int) -> SimulatedJob:
    if len(row) != len(COLUMNS):
        raise ConfigError(f"{where}: {len(row)} columns, not {len(COLUMNS)}")
    given = {name: value.strip() for name, value in zip(COLUMNS, row, strict=True)}
    if not is_name(given["job"]):
        raise ConfigError(f"{where}: job {given['job'][:80]!r} is no name")
    values = {name: _number(where, name, given[name]) for name in _RANGES}
    for phase in ("roll", "train"):
        if values[f"{phase}_max_s"] < values[f"{phase}_s"]:
            raise ConfigError(f"{where}: {phase}_max_s is less than {phase}_s")
    iteration_s = (values["roll_max_s"] + values["train_max_s"]) * max(1.0, values["drift"])
    if (life_s := values["iterations"] * iteration_s) > SPAN_MAX_S:
        words = f"may take {life_s:g} s with drift; the most is {SPAN_MAX_S:g} s"
        raise ConfigError(f"{where}: iterations of roll_max_s and train_max_s {words}")
    maxima_s = (values["roll_max_s"], values["train_max_s"])
    return SimulatedJob(
        job=JobSpec(
            job=JobId(given["job"]),
            tenant=TenantId("simulated"),
            phases=phases(*maxima_s, int(values["roll_nodes"]), int(values["train_nodes"])),
            host_bytes=int(values["host_gb"] * GB),
            slo=values["slo"],
        ),
        arrival_s=values["arrival_s"],
        lengths_s=drawn_lengths(
            np.random.Generator(np.random.PCG64([seed, number])),
            (values["roll_s"], values["train_s"]),
            maxima_s,
            iterations=int(values["iterations"]),
            cv=values["phase_cv"],
            drift=values["drift"],
        ),
        means_s=(values["roll_s"], values["train_s"]),
        drift=values["drift"],
    )


def _number(where: str, name: str, text: str) -> float:
    least, most = _RANGES[name]
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where}: {name} {text[:40]!r} is no number") from None
    if not least <= value <= most:
        raise ConfigError(f"{where}: {name} is {text}; it must be {least:g} to {most:g}")
    if name in _WHOLE and value != int(value):
        raise ConfigError(f"{where}: {name} is {text}; it must be whole")
    return value
