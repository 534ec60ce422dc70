"""The log of a service's process: one form of lines on stderr."""

import logging
import os

from harvester.contracts.errors import ConfigError


class _JournalForm(logging.Formatter):
    """Lines for journald, which has the time: each begins with its priority (sd-daemon(3))."""

    def format(self, record: logging.LogRecord) -> str:
        # Debug is 7, info 6, warning 4, error 3, critical 2.
        priority = {10: 7, 20: 6, 30: 4, 40: 3, 50: 2}.get(record.levelno, 5)
        text = super().format(record)
        return "\n".join(f"<{priority}>{line}" for line in text.splitlines())


def begin_log(level: str = "info") -> None:
    """Raises ConfigError for a level that does not exist."""
    if level.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(f"--log-level {level}: use debug, info, warning or error")
    handler = logging.StreamHandler()
    if "JOURNAL_STREAM" in os.environ:
        handler.setFormatter(_JournalForm("%(levelname)s %(name)s: %(message)s"))
    else:
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler])
