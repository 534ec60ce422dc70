"""The log of a service's process: one form of lines on stderr, for agent and gateway."""

import logging

from harvester.contracts.errors import ConfigError


def begin_log(level: str) -> None:
    """Raises ConfigError for a level that does not exist."""
    if level.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(f"--log-level {level}: use debug, info, warning or error")
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form)
