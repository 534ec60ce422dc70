"""`rosemux discover`: the slots of a node's production engines, for an agent's `slots_file`.

A separate process: the agent asks neither systemd nor Kubernetes, and if discovery fails, the slots
that it wrote last stay.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import yaml

from harvester.cli.server_call import CaFile, ServerName, TokenToSend, call, credentials_of
from harvester.config_file import DISCOVERED, DISCOVERED_AGAIN_S, SlotsFile, read_agent_config
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.discovery.kubernetes_pods import (
    LABEL,
    MAX_REPLY_BYTES,
    PodList,
    found_pods,
    pods_path,
)
from harvester.discovery.production_gpus import ProductionGpus
from harvester.discovery.slot_template import (
    DiscoveredEngine,
    Fields,
    KeptSlots,
    SlotTemplate,
    StatedGpus,
    no_statement,
)
from harvester.discovery.systemd_units import checked_patterns, found_units
from harvester.platform import whole_file
from harvester.platform.logs import begin_log
from harvester.platform.yaml_file import MAX_FILE_BYTES, parse_fields, read_text, validated

_log = logging.getLogger(__name__)

_HEADER = f"{DISCOVERED}: what is changed here is lost. Change its template.\n"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Template = Annotated[
    Path,
    typer.Option(
        help="YAML file: a slot's fields without its name; $name, $host, $port are filled."
    ),
]
Write = Annotated[
    Path | None,
    typer.Option(help="Slots file to keep up to date; without it the slots are printed once."),
]
Every = Annotated[float, typer.Option("--every-s", min=1.0, help="Seconds between two looks.")]
AgentFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="The agent's YAML file: its pages show on which GPUs production runs, for the guest.",
    ),
]
ForgetAfter = Annotated[
    float, typer.Option("--forget-s", min=0.0, help="Seconds for which a missing engine is kept.")
]

discover = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Write the slots of a node's production engines for its agent's slots_file.",
)


@discover.command()
def systemd(
    template: Template,
    units: Annotated[
        list[str], typer.Option("--unit", help="Unit's name or pattern, such as 'vllm@*.service'.")
    ],
    config: AgentFile = None,
    write: Write = None,
    every_s: Every = 10.0,
    forget_s: ForgetAfter = 60.0,
) -> None:
    """Engines that are units of this machine. A slot's name is the last part of the unit's
    ROSEMUX_PAGE_DIR, without one the unit's instance or name; $port is its command's --port, $x its
    variable ROSEMUX_SLOT_X."""
    patterns = checked_patterns(units)
    _run(template, lambda: found_units(patterns), config, write, every_s, forget_s)


@discover.command()
def kubernetes(
    template: Template,
    node: Annotated[
        str, typer.Option(envvar="NODE_NAME", help="The node, by its Kubernetes name.")
    ],
    namespace: Annotated[str, typer.Option(help="Of these pods alone; by default of all.")] = "",
    label: Annotated[str, typer.Option(help="Label whose value names a pod's slot.")] = LABEL,
    server: Annotated[
        str, typer.Option(help="The API's URL; by default the one that this pod is given.")
    ] = "",
    token_file: TokenToSend = None,
    ca_file: CaFile = None,
    server_name: ServerName = None,
    config: AgentFile = None,
    write: Write = None,
    every_s: Every = 10.0,
    forget_s: ForgetAfter = 60.0,
) -> None:
    """Engines that are running pods of this node. $host is the pod's address, $x its annotation
    rosemux.dev/x, and $port without one its first container port; $node is the node's name and
    $node_ip its address."""
    if not server:
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{each}", "") for each in ("HOST", "PORT"))
        if not host:
            raise ConfigError("--server: give the API's URL, as this is no pod of the cluster")
        server = f"https://{f'[{host}]' if ':' in host else host}:{port or 443}"
        token_file = token_file or _SERVICE_ACCOUNT / "token"
        ca_file = ca_file or _SERVICE_ACCOUNT / "ca.crt"
    credentials = credentials_of(token_file, ca_file, None, None, server_name)
    path = pods_path(node=node, label=label, namespace=namespace)

    def find() -> list[DiscoveredEngine]:
        pods = call(
            server, path, PodList, credentials, option="--server", most_bytes=MAX_REPLY_BYTES
        )
        return found_pods(pods, label=label)

    _run(template, find, config, write, every_s, forget_s)


def _run(
    template: Path,
    find: Callable[[], list[DiscoveredEngine]],
    config: Path | None,
    write: Path | None,
    every_s: float,
    forget_s: float,
) -> None:
    slots = SlotTemplate(parse_fields(read_text(template), template))
    if write is None:
        stated = no_statement if config is None else _of_pages(config)
        found, faults = slots.slots(find(), stated)
        typer.echo(_text([*found.values()]), nl=False)
        for fault in faults:
            typer.echo(fault, err=True)
        return
    begin_log("info")
    clock = MonotonicClock()
    last = _written(write)
    kept = KeptSlots(last, forget_s=forget_s)
    stated = _lasting(config, last)
    writer = SlotsWriter(find=find, template=slots, kept=kept, file=write, stated=stated)
    while True:
        writer.take(now=clock.now())
        time.sleep(every_s)


def _of_pages(config: Path, last: Mapping[str, Fields] | None = None) -> StatedGpus:
    """Statements from the pages of the agent's file; `last`: the slots that were written last.
    Raises ConfigError."""
    gpus = {
        name: tuple(guest.get("gpus", ()))
        for name, slot in (last or {}).items()
        if isinstance(guest := slot.get("guest"), dict)
    }
    return ProductionGpus(read_agent_config(config).config, last=gpus)


def _lasting(config: Path | None, last: Mapping[str, Fields]) -> StatedGpus:
    """Statements for a discovery that goes on: a fault of the agent's file is logged, since slots
    without GPUs are better than none."""
    if config is None:
        return no_statement
    try:
        return _of_pages(config, last)
    except ConfigError as error:
        _log.error("no GPU is read from production's pages before a restart: %s", error)
        return no_statement


@dataclass(slots=True, kw_only=True)
class SlotsWriter:
    find: Callable[[], list[DiscoveredEngine]]
    template: SlotTemplate
    kept: KeptSlots
    file: Path
    stated: StatedGpus = no_statement
    _reported: tuple[str, ...] = ()
    """Faults of the last look."""
    _written_s: float | None = None

    def take(self, *, now: float) -> None:
        """Looks once and writes the file if its slots changed or it is old: its age says when a
        look last succeeded. Logs faults when they begin."""
        try:
            found, faults = self.template.slots(self.find(), self.stated, first=self.kept.on_gpus)
            text = _text(self.kept.observe(found, now=now)).encode()
            if len(text) > MAX_FILE_BYTES:
                raise Exhausted(f"{len(text)} bytes are more than an agent reads")
            changed = not self.file.exists() or self.file.read_bytes() != text
            old = self._written_s is None or now - self._written_s >= DISCOVERED_AGAIN_S
            if changed or old:
                whole_file.replace(self.file, text, mode=0o644)
                self._written_s = now
            if changed:
                _log.info("%s: slots %s", self.file, ", ".join(sorted(found)) or "none")
        except Exhausted as error:
            faults = [f"the slots stay as they are: {error}"]
        except OSError as error:
            faults = [f"{self.file} cannot be written: {error.strerror}"]
        for fault in sorted({*faults} - {*self._reported}):
            _log.error("%s", fault)
        if self._reported and not faults:
            _log.info("every engine that is found has a slot again")
        self._reported = tuple(faults)


def _text(slots: list[Fields]) -> str:
    return _HEADER + yaml.safe_dump({"slots": slots}, sort_keys=False)


def _written(file: Path) -> dict[str, Fields]:
    """The slots that an earlier process wrote, by name; none of a file that is not ours."""
    if not file.exists():
        return {}
    text = read_text(file)
    if not text.startswith(_HEADER):
        raise ConfigError(f"--write {file}: not a file of `rosemux discover`; remove it first")
    try:
        fields = parse_fields(text, file)
        validated(SlotsFile, fields, text, file)
    except ConfigError as error:  # For example after an upgrade that dropped a field.
        _log.warning("the last slots file stays as it is: %s", error)
        return {}
    return {slot["name"]: slot for slot in fields["slots"]}
