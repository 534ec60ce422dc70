"""Folders with Python code, the four packages first."""

CODE = (
    "harvester",
    "coserve",
    "weightsync",
    "scheduler",
    "benchmarks",
    "deploy",
    "examples",
    "tests",
)
