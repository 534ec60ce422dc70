"""`rosemux top`: the slots of one or more agents, refreshed each second; it changes nothing."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from harvester.cli.agent_tables import agent_faults
from harvester.cli.audit_command import printable, row_console
from harvester.cli.row_table import add_row, row_table
from harvester.cli.server_call import (
    CaFile,
    CertFile,
    KeyFile,
    ServerName,
    TokenToSend,
    call,
    credentials_of,
)
from harvester.config import AgentConfig
from harvester.config_file import read_agent_config
from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.wire.leases import GuardReading, IdleForecast, SlotOffer, SlotOffers
from harvester.platform.tls import Credentials

_MOST_AT_ONCE = 16
_HEAD = (
    *("node", "slot", "mode", "state", "tenant/job"),
    *("idle next 30 s", "TTFT", "ITL", "tokens/s"),
)
_MORE = ("lends", "guards: value of limit (! binds)", "reason")
_NAMES = ("node", "slot", "tenant/job")
_HORIZON_S = 30.0
"""The forecast that is shown: about as far as a turn keeps its place."""
_WIDEST = 10_000
"""Columns in which no row is cut."""
_WILDCARDS = ("0.0.0.0", "::")


def top(
    agents: Annotated[
        list[str] | None, typer.Argument(help="URLs of agents, e.g. http://127.0.0.1:9711.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The YAML file of an agent on this machine.")
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two refreshes.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and stop.")] = False,
    token_file: TokenToSend = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
) -> None:
    urls = list(agents or [])
    if config is not None:
        loaded = read_agent_config(config).config
        urls.append(_url_of(loaded))
        token_file = token_file or loaded.http.observer_token_file or loaded.http.token_file
    if not urls:
        raise ConfigError("name the URLs of agents, or an agent's file with --config")
    credentials = credentials_of(token_file, ca_file, cert_file, key_file, server_name)
    view = AgentsView(urls, credentials, clock=MonotonicClock())
    if once:
        _print_once(view, interval)
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        raise ConfigError("the output is no terminal: add --once")
    with Live(view.table(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(view.table(), refresh=True)


def _print_once(view: "AgentsView", interval: float) -> None:
    """Two questions, since tokens per second are a difference. Raises Exhausted where no agent
    answers."""
    view.table()
    time.sleep(interval)
    table = view.table()
    row_console().print(table)
    if not view.answered:
        raise Exhausted("no agent answers; `rosemux status` shows why")


def _url_of(config: AgentConfig) -> str:
    http = config.http
    host = "127.0.0.1" if http.host in _WILDCARDS else http.host
    shown = f"[{host}]" if ":" in host else host
    if http.port == 0:
        raise ConfigError("http.port: 0 is any free port; name the agent's URL")
    return f"{'http' if http.tls is None else 'https'}://{shown}:{http.port}"


@dataclass(slots=True)
class SlotRows:
    """Slots as a table of one line each, or where the terminal is too narrow for that as a table
    of their numbers, with the texts below it."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    faults: list[Text] = field(default_factory=list)
    """Agents that gave no answer, and parts of their configurations that are not in force."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = row_table(*_HEAD, *_MORE, names=_NAMES)
        numbers = row_table(*_HEAD, names=_NAMES)
        for row in self.rows:
            add_row(whole, *row)
            add_row(numbers, *row[: len(_HEAD)])
        yield from self.faults  # First: a screen that is too low cuts what is below.
        wide = options.update(max_width=_WIDEST)
        if not self.rows or whole.__rich_measure__(console, wide).maximum <= options.max_width:
            yield whole
        else:
            yield numbers
            for row in self.rows:
                yield printable(f"{row[0]}/{row[1]}: {'; '.join(filter(None, row[len(_HEAD) :]))}")


@dataclass(slots=True)
class AgentsView:
    """The last answers of several agents, as one table."""

    urls: Sequence[str]
    credentials: Credentials
    clock: Clock
    answered: int = 0
    """Agents that answered last."""
    _counted: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)
    """Time and tokens of each agent's slot when it was last seen."""

    def table(self) -> SlotRows:
        """Ask all agents at once; an agent without an answer has a line with the reason."""
        table = SlotRows()
        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
            found = list(pool.map(self._ask, self.urls))
        self.answered = sum(not isinstance(one, str) for one in found)
        for url, answer in zip(self.urls, found, strict=True):
            if isinstance(answer, str):
                table.faults.append(printable(answer))
                continue
            table.rows += (self._row(url, offer) for offer in answer.slots)
            table.faults += (printable(f"{answer.node}: {each}") for each in agent_faults(answer))
        return table

    def _ask(self, url: str) -> SlotOffers | str:
        try:
            return call(url, "/v1/slots", SlotOffers, self.credentials, option="agent")
        except Exhausted as error:
            return str(error)

    def _row(self, url: str, offer: SlotOffer) -> tuple[str, ...]:
        # An agent of before names no decision.
        states = dict.fromkeys(filter(None, (offer.slot_state, offer.state.value)))
        lending = offer.lending
        return (
            *(offer.node, offer.slot, offer.mode, "/".join(states)),
            f"{offer.tenant}/{offer.job}" if offer.tenant or offer.job else "",
            _expected(offer.forecasts),
            _milliseconds(offer.ttft_s),
            _milliseconds(offer.itl_s),
            self._pace(url, offer),
            f"{lending.tokens} tokens, {lending.share_ratio:.0%}" if lending.tokens else "",
            "  ".join(map(_margin, offer.guards)),
            offer.reason or lending.reason,
        )

    def _pace(self, url: str, offer: SlotOffer) -> str:
        now, total = self.clock.now(), offer.guest_tokens_total
        before = self._counted.get((url, offer.slot))
        self._counted[url, offer.slot] = now, total
        if before is None or now <= before[0]:
            return ""
        # The counter of a restarted guest begins at 0.
        return f"{max(0, total - before[1]) / (now - before[0]):.0f}"


def _expected(forecasts: Sequence[IdleForecast]) -> str:
    """Median and middle 80 % of the idle share; "" while none is known."""
    each = next((one for one in forecasts if one.horizon_s == _HORIZON_S), None)
    if each is None:
        return ""
    return f"{each.median_ratio:.0%} ({each.low_ratio:.0%} to {each.high_ratio:.0%})"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _margin(guard: GuardReading) -> str:
    return f"{guard.guard} {guard.value:.2g} of {guard.limit:.2g}{'!' if guard.binds else ''}"
