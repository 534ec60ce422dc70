"""`rosemux guest`: the guest of one slot, as the agent's file describes it."""

import asyncio
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from coserve.guest import isolation
from coserve.guest.gpus import Gpu, gpus
from coserve.guest.isolation import MpsShare
from coserve.vllm import launch
from coserve.vllm.capabilities import Capabilities
from coserve.vllm.guest_plan import GuestPlan, GuestSettings, PlanOption, plan, plan_options
from harvester.agent.guest_engine import GuestEngine, run_with_restarts
from harvester.agent.guest_lock import GuestLock
from harvester.agent.guest_placement import misplacement
from harvester.agent.mps_watch import MpsWatch
from harvester.agent.shared_memory import SharedMemory
from harvester.cli.audit_command import printable
from harvester.cli.guest_checks import checks, outlook, refuse_bad, supported_vllm
from harvester.config import SlotConfig
from harvester.config_file import load_agent_config, read_agent_config
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, NotYet
from harvester.contracts.isolation import IsolationBackend
from harvester.contracts.page import PageDirectory
from harvester.guest_config import GuestConfig
from harvester.platform.idle_groups import IdleGroups
from harvester.platform.kv_segment import KvSegment
from harvester.platform.mps import PIPE_VARIABLE
from harvester.platform.scheduling_group import is_under_idle, scheduling_group
from harvester.policy.settings import AUTO


def guest(
    config: Annotated[Path, typer.Option(help="The agent's YAML file.")],
    slot: Annotated[
        str | None, typer.Option(help="Name of the slot; may be left out if there is one.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the requirements, print the chosen settings with reasons, and stop.",
        ),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Start a guest that failed again: in 10 s to 10 minutes."),
    ] = False,
) -> None:
    agent = load_agent_config(config, slot=slot)
    chosen = agent.slot_named(slot)
    requested = _guest(chosen)
    pages = PageDirectory(agent.pages_of(chosen), agent.owners_of(chosen))
    console = Console()
    found = checks(requested, pages, imports=dry_run)
    for check in found:
        mark = "good" if check.good else "WRONG"
        console.print(printable(f"{check.what}: {mark}: {check.says}"), soft_wrap=True)
    vllm = supported_vllm()
    settings = _settings(chosen, requested, discovered=_is_discovered(config, chosen))
    console.print(
        _table(plan_options(settings, vllm), title=f"Slot {chosen.name}, vLLM {vllm.version}")
    )
    planned = plan(settings, vllm)
    command = _command(chosen, requested, planned, pages, gpus=settings.gpus, vllm=vllm)
    seen = outlook(planned.isolation, agent.settings_of(chosen), pages) if dry_run else ()
    misplaced = partial(misplacement, [gpu.uuid for gpu in settings.gpus], pages, chosen.pulses)
    for note in (*seen, *_notes(chosen, planned, pages)):
        console.print(printable(f"- {note}"), soft_wrap=True)
    if dry_run:
        _print_command(command, planned)
    refuse_bad(found)
    if why := misplaced():
        raise NotYet(why)
    if not dry_run:
        raise typer.Exit(_run(command, settings, planned, pages, misplaced, restart=restart))


def _command(
    slot: SlotConfig,
    requested: GuestConfig,
    planned: GuestPlan,
    pages: PageDirectory,
    *,
    gpus: Sequence[Gpu],
    vllm: Capabilities,
) -> launch.EngineCommand:
    # Before the operator's own flags, which win.
    parallel = ("--tensor-parallel-size", str(len(gpus))) if len(gpus) > 1 else ()
    spec = launch.EngineSpec(
        name="guest",
        model=requested.model,
        port=_port(slot),
        max_model_len=requested.context_tokens,
        max_num_seqs=slot.concurrency,
        vllm=vllm,
        kv_cache_gib=planned.kv_cache_gib,
        gpu=planned.gpu,
        extra_arguments=(*parallel, *requested.arguments),
    )
    command = launch.guest(
        spec,
        pages=pages.path,
        weights=requested.weights,
        isolation=planned.isolation,
        slot=slot.name,
    )
    return replace(command, environment=command.environment | pages.owners.variable())


def _run(
    command: launch.EngineCommand,
    settings: GuestSettings,
    planned: GuestPlan,
    pages: PageDirectory,
    misplaced: Callable[[], str],
    *,
    restart: bool,
) -> int:
    """Run the guest, the only one of its slot, and return its exit status."""
    segment = None
    if settings.shared_kv:
        segment = KvSegment(settings.shared_kv, owners=frozenset((os.getuid(),)))
    lock = GuestLock(pages)
    lock.take()
    if segment is not None:
        lock.clear(segment)
    mps = None if planned.isolation.fault_isolated else settings.mps
    watch = None if mps is None else MpsWatch(mps.control, look_s=1.0)

    def engine() -> GuestEngine:
        return GuestEngine(
            command.arguments,
            command.environment,
            mps=watch,
            segment=segment,
            inherits=(lock.descriptor,),
            pages=PageDirectory(pages.path),
            misplacement=misplaced,
        )

    try:
        isolation.apply_to_process(planned.isolation)
        runs = run_with_restarts(engine, clock=MonotonicClock()) if restart else engine().run()
        return asyncio.run(runs)
    finally:
        with suppress(PermissionError):  # a unit without LimitNICE=+0 stays idle to its end
            isolation.lift_from_process()
        isolation.clear()


def _guest(slot: SlotConfig) -> GuestConfig:
    if slot.guest is None:
        raise ConfigError(
            f"slot {slot.name} has no guest: add `guest: {{model: ..., weights: ..., "
            "context_tokens: ..., kv_cache_bytes: ...}`"
        )
    return slot.guest


def _is_discovered(config: Path, slot: SlotConfig) -> bool:
    """Whether the slot is in the agent's `slots_file`."""
    return slot.name not in {each.name for each in read_agent_config(config).config.slots}


def _settings(slot: SlotConfig, requested: GuestConfig, *, discovered: bool) -> GuestSettings:
    share, configured = None, slot.policy.blocking_ratio
    if slot.mps is not None:
        share = MpsShare(
            slot.mps.daemon,
            active_thread_percentage=requested.active_thread_percentage,
            blocking_ratio=1.0 if configured == AUTO else configured,
        )
    return GuestSettings(
        kv_cache_bytes=requested.kv_cache_bytes,
        memory_bytes=_memory_bytes(slot),
        gpus=_gpus(requested.gpus, discovered=discovered),
        isolation=requested.isolation,
        mps=share,
        shared_kv="" if slot.kvcached is None else slot.kvcached.guest,
        sleeps=requested.sleeps,
        eager=requested.eager,
    )


def _memory_bytes(slot: SlotConfig) -> int:
    """Memory of this machine, or less where the slot's control group has a limit."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_bytes = SharedMemory(slot.memory_group).read().limit_bytes if slot.memory_group else 0
    return min(machine_bytes, limit_bytes or machine_bytes)


def _gpus(named: Sequence[str], *, discovered: bool) -> tuple[Gpu, ...]:
    """The named GPUs, or the only one present. Raises ConfigError if a choice would be a guess, and
    NotYet if discovery may still name them, once production has stated its own."""
    there = {gpu.uuid: gpu for gpu in gpus()}
    absent = sorted(set(named) - there.keys())
    if absent:
        raise ConfigError(
            f"gpus: no {', '.join(absent)} here; nvidia-smi lists {', '.join(there) or 'none'} "
            "(slices of MIG are not supported)"
        )
    if not named and len(there) > 1 and discovered:
        raise NotYet(
            "gpus: the slots file has none for this slot until production states its own, out of "
            f"{', '.join(there)}"
        )
    if not named and len(there) > 1:
        raise ConfigError(f"gpus: name the slot's GPUs out of {', '.join(there)}")
    return tuple(there[name] for name in named or there)


def _port(slot: SlotConfig) -> int:
    port = urlsplit(slot.engine_url).port
    if port is None:
        raise ConfigError(
            f"slot {slot.name}: engine_url needs a port, such as http://127.0.0.1:8001"
        )
    return port


def _notes(slot: SlotConfig, planned: GuestPlan, pages: PageDirectory) -> list[str]:
    """Notes for the operator: consequences of the plan, and what production needs for it."""
    notes = []
    configured, promised = slot.policy.blocking_ratio, planned.isolation.blocking_ratio
    if configured != AUTO and configured < promised:
        notes.append(
            f"blocking_ratio {configured:g} is yours: {planned.isolation.backend} promises "
            f"{promised:g}. Leave it only where you have measured it"
        )
    if slot.mps is not None and planned.isolation.fault_isolated:
        notes.append("mps has consent but no guest uses it: set guest.isolation: mps")
    production = pages.owners.variable()
    if not planned.isolation.fault_isolated and slot.mps is not None:
        production[PIPE_VARIABLE] = str(slot.mps.pipe_directory)
        notes.append(
            "shared fate: a fault of the guest ends production. Never kill -9 the guest; stop it "
            "with SIGTERM to this process"
        )
        daemon = slot.mps.daemon
        if not any(daemon.clients(server) for server in daemon.servers()):
            notes.append(
                "this MPS daemon has no client: was production started with its pipe directory?"
            )
    names = () if slot.kvcached is None else slot.kvcached.production
    for variables in [production | launch.shared_memory(name) for name in names] or [production]:
        if variables:
            listed = " ".join(f"{name}={value}" for name, value in variables.items())
            notes.append(f"production needs, with one restart: {listed}")
    if planned.gpu is not None:
        notes.append(
            f"guests start one at a time on a GPU, by locks in {pages.path.parent}; do not restart "
            "production meanwhile. Nothing of this has run on a GPU"
        )
        if is_under_idle(scheduling_group(os.getpid())):
            notes.append(
                "WARNING: this control group is idle: a starved thread of the guest may hold a "
                "lock of the GPU's driver that production waits for. Install guest-gpu.conf"
            )
    if planned.isolation.backend is IsolationBackend.IDLE_GROUP:
        notes.append("an idle control group of its own is made and goes with the guest")
    notes.append("nothing else changes on the host")
    return notes


def _table(options: Sequence[PlanOption], *, title: str) -> Table:
    table = Table("", "choice", "", "why", title=title, title_justify="left")
    for option in options:
        mark = "taken" if option.taken else "possible" if option.possible else "not here"
        table.add_row(*map(printable, (option.question, option.choice, mark, option.why)))
    return table


def _print_command(command: launch.EngineCommand, planned: GuestPlan) -> None:
    """Print the command for a shell, a unit file or a pod."""
    idle = planned.isolation.backend is IsolationBackend.IDLE
    if planned.isolation.backend is IsolationBackend.IDLE_GROUP:
        for line in IdleGroups().commands():
            typer.echo(line)
    for name, value in sorted(command.environment.items()):
        typer.echo(f"{name}={shlex.quote(value)} \\")
    typer.echo(("chrt --idle 0 " if idle else "") + shlex.join(command.arguments))
