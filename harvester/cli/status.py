"""`rosemux status`: reads pages, asks an agent and, on request, a gateway; it changes nothing."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from harvester.agent.guest_lock import GUEST_LOCK
from harvester.cli.agent_tables import agent_faults, agent_sentences, agent_tables, gib, slot_faults
from harvester.cli.audit_command import printable, row_console
from harvester.cli.gateway_tables import GatewayReport
from harvester.cli.row_table import row_table
from harvester.cli.server_call import (
    CaFile,
    CertFile,
    KeyFile,
    ServerName,
    TokenToSend,
    call,
    credentials_of,
)
from harvester.config import HttpConfig
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.page import (
    Calibration,
    Grant,
    Guest,
    GuestMemory,
    PageDirectory,
    PageFault,
    PageName,
    PageReader,
    Pulse,
    Reading,
)
from harvester.contracts.page.owners import user_name
from harvester.contracts.wire.leases import SlotOffers
from harvester.platform.file_lock import lock_holder
from harvester.platform.whole_file import is_there

_RECORDS: dict[str, type[Grant | Guest | Pulse]] = {PageName.GRANT: Grant, PageName.GUEST: Guest}
"""Every other page is a pulse."""
_ROOTS = (Path("/run/rosemux"), Path("/dev/shm/rosemux"))
"""The shipped files' one, and the default of `page_root`."""
_LOCAL_AGENT = f"http://127.0.0.1:{HttpConfig().port}"
"""The agent to ask if neither an agent nor a gateway is named."""


def status(
    pages: Annotated[Path, typer.Option(help="Directory that holds the slots' pages.")] = next(
        filter(Path.exists, _ROOTS), _ROOTS[-1]
    ),
    agent_url: Annotated[
        str | None, typer.Option("--agent", help=f"Agent to ask; without --gateway {_LOCAL_AGENT}.")
    ] = None,
    gateway_url: Annotated[
        str | None, typer.Option("--gateway", help="Gateway to ask, e.g. http://127.0.0.1:8300.")
    ] = None,
    token_file: TokenToSend = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
    check: Annotated[
        bool, typer.Option(help="Exit status 1 if agent or gateway have a fault to look at.")
    ] = False,
) -> None:
    console, faults = row_console(), list[str]()
    if check and agent_url is None and gateway_url is None:
        raise ConfigError("--check asks an agent or a gateway: give --agent or --gateway")
    credentials = credentials_of(token_file, ca_file, cert_file, key_file, server_name)
    offers, silence = None, None
    if agent_url is not None or gateway_url is None:
        url, option = (_LOCAL_AGENT, "agent") if agent_url is None else (agent_url, "--agent")
        try:
            offers = call(url, "/v1/slots", SlotOffers, credentials, option=option)
        except Exhausted as error:
            silence = error
    try:
        directories = _slot_directories(pages)
    except PermissionError as error:
        if silence is not None and agent_url is None:
            raise
        directories = []
        console.print(printable(f"Pages are not shown: {error.filename}: {error.strerror}"))
    if not directories and silence is not None and agent_url is None:
        raise ConfigError(
            f"no pages under {pages}, and {silence}: start `rosemux agent`, or give --pages, "
            "--agent or --gateway"
        )
    if directories:
        # The agent read the guest's page at another time: one of two figures is shown.
        lending = [offer.slot for offer in offers.slots if offer.lending.summary] if offers else ()
        console.print(_page_table(directories, lending_elsewhere=lending))
    if silence is not None:
        if agent_url is not None:
            raise silence
        unseen = f"Leases, guards and budgets are not shown: {silence}; name the agent by --agent"
        console.print(printable(f"{unseen}, and give the credentials that it asks for"))
    if offers is not None:
        faults += _print_agent(console, offers)
    if gateway_url is not None:
        report = call(gateway_url, "/v1/status", GatewayReport, credentials, option="--gateway")
        faults += _print_gateway(console, report)
    if check and faults:
        raise typer.Exit(1)


def _print_agent(console: Console, offers: SlotOffers) -> list[str]:
    """The faults."""
    for table in agent_tables(offers):
        console.print(table, "", sep="\n")
    for sentence in agent_sentences(offers):
        console.print(printable(sentence))
    return [*agent_faults(offers), *slot_faults(offers)]


def _print_gateway(console: Console, report: GatewayReport) -> list[str]:
    """The faults."""
    console.print(*map(printable, report.summary()), sep="\n")
    for table in report.tables():
        console.print("", table, sep="\n")
    faults = [*report.faults()]
    if sentences := [*report.reasons(), *faults]:
        console.print("", *map(printable, sentences), sep="\n")
    return faults


def _slot_directories(pages: Path) -> list[PageDirectory]:
    """Raises PermissionError where this user may not look: no page is another matter."""
    found = [pages, *sorted(path for path in pages.glob("*") if path.is_dir())]
    return [PageDirectory(path) for path in found if is_there(path / PageName.GRANT)]


def _page_table(
    directories: list[PageDirectory], *, lending_elsewhere: Collection[str] = ()
) -> Table:
    """`lending_elsewhere`: slots of which another line says what they can lend."""
    table = row_table("slot", "page", "user", "age", "says", names=("says",), title="Pages")
    for directory in directories:
        for row in _page_rows(directory, lends=directory.path.name not in lending_elsewhere):
            table.add_row(*map(printable, (directory.path.name, *row)))
    return table


def _page_rows(directory: PageDirectory, *, lends: bool) -> list[tuple[str, str, str, str]]:
    """One row per page, read as this user; the agent's log names the users it believes."""
    now_ns = monotonic_ns()
    rows = []
    for name in (PageName.GRANT, *directory.pulse_names(), PageName.GUEST):
        path = directory.path / name
        owners = frozenset({path.stat().st_uid}) if path.exists() else frozenset()
        kind = _RECORDS.get(name, Pulse)
        reader = PageReader(path, kind, owners=owners)
        reading = reader.read(now_ns=now_ns)
        left = reader.read_left() if reading.fault is PageFault.EXPIRED else reading
        age = "" if left.record is None else _age((now_ns - left.stamp_ns) / 1e9)
        says = _summary(reading, lends=lends)
        if reading.record is None:
            says += _writer(directory, name, left.record)
        rows.append((str(name), ", ".join(map(user_name, owners)), age, says))
    return rows


def _age(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"


def _writer(directory: PageDirectory, name: str, left: Grant | Guest | Pulse | None) -> str:
    """Processes that should have written a page, as far as they are seen."""
    if name == PageName.GUEST and left is None:
        pid = lock_holder(directory.path / GUEST_LOCK)
        return "" if pid is None else f"; process {pid} starts a guest, or gets no core"
    processes = left.processes if isinstance(left, Guest) else ()
    if isinstance(left, Pulse) and left.root is not None:
        processes = (left.root,)
    living = dict.fromkeys(str(each.pid) for each in processes if each.lives())
    if not living:
        return "; no process of it is seen here" if processes else ""
    return f"; process {', '.join(living)} lives: it gets no core, or hangs"


def _summary(reading: Reading[Grant | Guest | Pulse], *, lends: bool = True) -> str:
    """`lends`: with what the guest may do by the slack law."""
    match reading.record:
        case Grant(epoch=epoch, mode=mode, reason=reason, step_tokens_cap=cap):
            return f"{mode} ({reason}), epoch {epoch}, step level {cap} tokens"
        case Guest() as guest:
            return (
                f"{' '.join(filter(None, (guest.gate, guest.reason)))}, epoch {guest.epoch}, "
                f"running {guest.running}, waiting {guest.waiting}, {guest.tokens_total} tokens, "
                f"{guest.kv_tokens_retained} retained, {guest.step_over_ratio:.0%} of steps longer "
                f"than predicted{_held(guest)}{_lent(guest) if lends else ''}"
                f"{_isolated(guest)}{_floor(guest.memory)}{_asleep(guest)}"
            )
        case Pulse() as pulse:
            return (
                f"in flight {pulse.in_flight}, waiting {pulse.waiting}, KV "
                f"{pulse.kv_usage_ratio:.0%}, model from {pulse.model_samples} steps, longer than "
                f"predicted: {_over(pulse.prefill_calibration, 'prefills')} and "
                f"{_over(pulse.decode_calibration, 'decodes')}"
            )
        case _:
            return str(reading.fault)


def _held(guest: Guest) -> str:
    """Calibration of the guest's step times: observed over predicted."""
    kinds = {"alone": guest.step_calibration, "beside production": guest.beside_calibration}
    ratios = [
        f"{found.p50_ratio:.2f} and {found.p90_ratio:.2f} times it {kind}"
        for kind, found in kinds.items()
        if found.steps
    ]
    return f" (P50 and P90: {', '.join(ratios)})" if ratios else ""


def _lent(guest: Guest) -> str:
    return f"; can be lent {guest.lending.summary}" if guest.lending.summary else ""


def _isolated(guest: Guest) -> str:
    backend, fault = guest.isolation, guest.isolation_fault
    if fault:
        return f"; isolation {backend} DOES NOT HOLD, its steps count whole: {fault}"
    fate = {
        "mps": " (shared fate: a fault of the guest ends production)",
        "time-slicing": " (takes turns with production on the GPU)",
    }
    return f"; isolation {backend}{fate.get(backend, '')}" if backend else ""


def _floor(memory: GuestMemory) -> str:
    """Accelerator memory that the guest holds while its gate is closed."""
    if memory.floor_bytes == 0:
        return ""
    bound = "" if memory.whole else "at least "
    return (
        f"; holds {bound}{gib(memory.floor_bytes)} while closed (weights "
        f"{gib(memory.weights_bytes)}, graphs {gib(memory.graphs_bytes)}, activations "
        f"{gib(memory.activations_bytes)}, context {gib(memory.other_bytes)}) and "
        f"{gib(memory.kv_bytes)} of KV"
    )


def _asleep(guest: Guest) -> str:
    if not guest.weights_away:
        return ""
    bound_bytes = guest.memory.asleep_bytes_max
    bound = f", where at most {gib(bound_bytes)} may stay" if bound_bytes else ""
    return f"; asleep, weights in host memory{bound}"


def _over(calibration: Calibration, what: str) -> str:
    """Share of steps longer than predicted. The model predicts the P90, so 10 % is ideal."""
    if calibration.steps == 0:
        return f"none of 0 {what}"
    return f"{calibration.over_ratio:.0%} of {calibration.steps} {what}"
