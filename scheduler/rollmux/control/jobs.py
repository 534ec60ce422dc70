"""Jobs of a `rosemux plan` file as submissions to a control that plans."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harvester.contracts.errors import ConfigError
from harvester.platform.yaml_file import explained, parse_fields, read_text
from scheduler.rollmux.cluster.submission import Submission, submission_fault
from scheduler.rollmux.plan.jobs_file import JOBS_MAX, PlannedJobSettings, PoolSettings


class JobsFile(BaseModel):
    """All but `jobs` may stand there for `rosemux plan`; the control has its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    jobs: tuple[PlannedJobSettings, ...] = Field(min_length=1, max_length=JOBS_MAX)
    nodes: PoolSettings | None = None
    risk: float | None = None
    slo_counts_queueing: bool | None = None


def read_submissions(path: Path) -> tuple[Submission, ...]:
    """In the order of the file. Raises ConfigError that names each wrong field with its line."""
    text = read_text(path)
    try:
        settings = JobsFile.model_validate(parse_fields(text, path))
    except ValidationError as error:
        raise ConfigError(explained(error, text, path)) from error
    found = tuple(job.as_submission for job in settings.jobs)
    for given in found:
        fault = submission_fault(given)
        if fault:
            raise ConfigError(f"{path}: job {given.job}: {fault}")
    return found
