"""Checks before a guest spends minutes on its start, each reported in one line."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coserve.guest import isolation
from coserve.guest.isolation import Isolation
from coserve.guest.isolation_watch import IsolationWatch
from coserve.vllm.capabilities import Capabilities, capabilities, installed_vllm_version
from harvester.contracts.errors import ConfigError, RoseMuxError, Unsupported
from harvester.contracts.isolation import PREEMPTING
from harvester.contracts.page import GrantMode, Guest, PageDirectory
from harvester.contracts.process import process_ids
from harvester.guest_config import GuestConfig
from harvester.policy.guest_watch import GuestWatch
from harvester.policy.sample import GuestReading
from harvester.policy.settings import Mode, SlotSettings

_IMPORT_S = 300.0
_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    good: bool
    says: str


def checks(requested: GuestConfig, pages: PageDirectory, *, imports: bool) -> tuple[Check, ...]:
    """`imports` tries vLLM in a separate process, which takes seconds."""
    return (
        _checked("vLLM", lambda: _vllm(supported_vllm(), imports=imports)),
        _checked("model", lambda: _model(requested)),
        _checked("weights", lambda: _weights(requested.weights)),
        _checked("pages", lambda: _pages(pages)),
    )


def refuse_bad(found: tuple[Check, ...]) -> None:
    """Raises ConfigError that names all that is wrong."""
    wrong = [check.says for check in found if not check.good]
    if wrong:
        raise ConfigError(f"the guest would not start: {'; '.join(wrong)}")


def supported_vllm() -> Capabilities:
    """vLLM of this interpreter, which runs the guest too. Raises ConfigError."""
    try:
        return capabilities(installed_vllm_version())
    except (ConfigError, Unsupported) as error:
        raise ConfigError(f"{error} ({sys.executable} would run the guest)") from error


def outlook(chosen: Isolation, settings: SlotSettings, pages: PageDirectory) -> tuple[str, ...]:
    """Sentences on a guest that would start from here: whether its isolation holds beside
    production, and what the slack law then lends it."""
    fault = _isolation_fault(chosen, pages) if chosen.backend in PREEMPTING else ""
    harvests = "is" if settings.mode is Mode.HARVEST else f"would, if mode were {Mode.HARVEST}, be"
    lends = (
        f"until it has learned its own step times, the guest {harvests} lent "
        f"{_lending(chosen, fault, settings, pages)}"
    )
    if chosen.backend not in PREEMPTING:
        return (lends,)
    here = f"isolation {chosen.backend} of a guest that starts from here"
    holds = f"DOES NOT HOLD, its steps count whole: {fault}" if fault else "holds"
    return f"{here} {holds}", lends


def _isolation_fault(chosen: Isolation, pages: PageDirectory) -> str:
    """Why the isolation would not hold: a process without work takes the guest's place and
    ends."""
    # Its log line would precede the note with the same words, and without a heading.
    logging.getLogger(IsolationWatch.__module__).addHandler(logging.NullHandler())
    waits = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as probe:
        processes = process_ids([probe.pid])
        watch = IsolationWatch(chosen.backend, pages, guest=lambda: processes)
        try:
            isolation.apply_to_process(chosen, probe.pid)
            watch.look()
            fault = watch.observed.fault
        except (OSError, Unsupported) as error:
            fault = str(error)
    isolation.clear()
    return fault


def _lending(chosen: Isolation, fault: str, settings: SlotSettings, pages: PageDirectory) -> str:
    """The slack law's loan under these settings, by production's pages and the agent's grant."""
    # The agent's environment has no numpy, which the step model needs.
    from coserve.law.lending import lending
    from coserve.law.step_time import StepTimeModel

    seen = pages.grant_reader().read().record
    names = () if seen is None else seen.pulses
    pulses = [pages.pulse_reader(name).read().record for name in names]
    present = [pulse for pulse in pulses if pulse is not None]
    if seen is None or not present or len(present) < len(pulses):
        return "what production's pulse and the agent's grant permit: they are not there yet"
    reading = GuestReading(
        record=Guest(
            isolation=chosen.backend, blocking_ratio=chosen.blocking_ratio, isolation_fault=fault
        )
    )
    watch = GuestWatch(settings)
    watch.observe(reading, leased=False, now=0.0)
    grant = msgspec.structs.replace(
        seen,
        mode=GrantMode.UNGATED if settings.ungated else GrantMode.OPEN,
        law=settings.law,
        ttft_slo_s=settings.ttft_slo_s,
        epsilon=settings.epsilon,
        phantom_prompt_tokens=settings.phantom_prompt_tokens,
        step_tokens_cap=settings.step_tokens_max,
        blocking_ratio=watch.blocking_ratio(settings.blocking_ratio, reading, now=0.0),
        preemption_s=watch.preemption_s(settings.preemption_s),
    )
    lent = lending(present, grant, StepTimeModel(), token_limit=settings.step_tokens_max)
    return lent.summary or "what its law admits, without a bound that could be stated"


def _checked(what: str, look: Callable[[], str]) -> Check:
    try:
        return Check(what, True, look())
    except RoseMuxError as error:
        return Check(what, False, str(error))


def _vllm(vllm: Capabilities, *, imports: bool) -> str:
    text = f"{vllm.version}, run by {sys.executable}"
    if not imports:
        return text
    try:
        subprocess.run(
            [sys.executable, "-c", "import vllm"],
            capture_output=True,
            check=True,
            text=True,
            timeout=_IMPORT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"`import vllm` takes longer than {_IMPORT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"{sys.executable} cannot import vLLM {vllm.version}: {why}") from error
    return text


def _model(requested: GuestConfig) -> str:
    folder = requested.model
    file = _folder("model", folder) / "config.json"
    try:
        with file.open("rb") as opened:
            config = json.loads(opened.read(_CONFIG_BYTES))
    except OSError as error:
        raise ConfigError(f"guest.model: {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"guest.model: {file} is not JSON: {error}") from error
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(f"guest.model: {file} names no architectures: is it the file of a model?")
    most = config.get("max_position_embeddings")
    own_rule = _context_by_another_rule(config, requested)
    if isinstance(most, int) and requested.context_tokens > most and not own_rule:
        raise ConfigError(
            f"guest.context_tokens: {requested.context_tokens} is more than the model's "
            f"max_position_embeddings, {most} in {file}"
        )
    return f"{', '.join(map(str, architectures))} in {folder}"


def _context_by_another_rule(config: dict[str, object], requested: GuestConfig) -> bool:
    """Whether vLLM may derive the longest context from more than `max_position_embeddings`."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    plain = isinstance(rope, dict) and not any(isinstance(each, dict) for each in rope.values())
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else ""
    # Another configuration, or fields over it; vLLM takes `_` for `-`, and a beginning of the flag.
    overridden = any(each.replace("_", "-").startswith("--hf-") for each in requested.arguments)
    allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in ("", "0")
    other = "model_max_length" in config or overridden or allowed
    return other or not plain or kind != "default"


def _weights(folder: Path) -> str:
    stores = [entry for entry in _folder("weights", folder).iterdir() if entry.is_dir()]
    return f"{len(stores)} stores in {folder}"


def _folder(field: str, folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"guest.{field}: {folder} is no directory that user {os.geteuid()} sees")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"guest.{field}: user {os.geteuid()} may not read {folder}")
    return folder


def _pages(pages: PageDirectory) -> str:
    try:
        pages.path.lstat()
    except OSError as error:
        raise ConfigError(
            f"no pages at {pages.path}: start `rosemux agent` first, or mount its directory here"
        ) from error
    pages.check()
    if pages.owners.guest and os.geteuid() not in pages.owners.guest:
        raise ConfigError(
            f"owners.guest names user {' or '.join(map(str, sorted(pages.owners.guest)))}, and you "
            f"are user {os.geteuid()}: the agent would not believe this guest"
        )
    for name in pages.pulse_names():
        pulse = pages.pulse_reader(name).read().record
        if pulse is not None and pulse.unfit:
            raise ConfigError(f"production ({name}) does not fit: {pulse.unfit}")
    return f"{pages.path}, {_granted(pages)}"


def _granted(pages: PageDirectory) -> str:
    grant = pages.grant_reader().read()
    if grant.record is None:
        # A guest starts anyway: the agent may come later; until then the gate is closed.
        return f"grant {grant.fault}: the guest would wait for `rosemux agent`"
    return f"grant {grant.record.mode} ({grant.record.reason})"
