"""Production engines that are systemd units of this machine, as `systemctl show` describes them."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.page.directory import DIRECTORY_VARIABLE
from harvester.discovery.slot_template import DiscoveredEngine

_PROPERTIES = "Id,ActiveState,Environment,ExecStart"
_UP = frozenset({"active", "activating", "reloading"})
_PATTERN = re.compile(r"[A-Za-z0-9@*?\[\]_.:\\-]{1,255}")
_ARGUMENTS = re.compile(r"argv\[\]=(.*?) ; ignore_errors=")
_PORT = re.compile(r"--port[= ](\d{1,5})(?!\S)")
_TIMEOUT_S = 10.0
_OWN = "ROSEMUX_SLOT_"
"""Prefix of variables that fill placeholders: ROSEMUX_SLOT_GPU is $gpu."""


def checked_patterns(patterns: Sequence[str]) -> Sequence[str]:
    """Raises ConfigError for an invalid unit name or pattern."""
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise ConfigError(f"--unit {pattern}: write a unit's name, such as 'vllm@*.service'")
    return patterns


def found_units(patterns: Sequence[str]) -> list[DiscoveredEngine]:
    """Engines of the units that are up. Raises Exhausted where systemd gives no answer."""
    command = ["systemctl", "show", "--no-pager", f"--property={_PROPERTIES}", "--", *patterns]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Exhausted(f"systemctl: {error}") from error
    if done.returncode:
        raise Exhausted(f"systemctl: {done.stderr.strip()[:300] or f'status {done.returncode}'}")
    # One engine for a unit that two patterns match.
    return [*{engine.origin: engine for engine in _engines(done.stdout)}.values()]


def _engines(shown: str) -> Iterator[DiscoveredEngine]:
    """Engines from the blocks of `systemctl show`; each block is one unit."""
    for block in shown.split("\n\n"):
        lines = (line.partition("=") for line in block.splitlines())
        unit = {name: value for name, _, value in lines}
        if unit.get("ActiveState") not in _UP:
            continue
        name = unit.get("Id", "")
        argv = _ARGUMENTS.search(unit.get("ExecStart", ""))
        port = _PORT.search(argv[1]) if argv else None
        variables = _variables(unit.get("Environment", ""))
        yield DiscoveredEngine(
            slot=_slot(name, variables),
            origin=f"unit {name}",
            port=port[1] if port else "",
            values={
                key.removeprefix(_OWN).lower(): value
                for key, value in variables.items()
                if key.startswith(_OWN)
            },
        )


def _variables(environment: str) -> dict[str, str]:
    try:
        pairs = (variable.partition("=") for variable in shlex.split(environment))
    except ValueError:  # A quote of systemd's that a shell would not write.
        return {}
    return {name: value for name, _, value in pairs}


def _slot(unit: str, variables: Mapping[str, str]) -> str:
    """Last part of the unit's page directory; without one, its instance or its name."""
    if pages := variables.get(DIRECTORY_VARIABLE):
        return PurePosixPath(pages).name
    stem = unit.removesuffix(".service")
    return stem.partition("@")[2] or stem
