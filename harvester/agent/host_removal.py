"""Takes back what agents and guests leave on a host: control groups, ranks, pages, locks, files.

It begins only where no agent and no guest of any slot runs. Objects that are not RoseMux's or are
still in use stay and are named. Audit, journals and states stay unless requested.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from harvester.agent.guest_lock import GUEST_LOCK, GuestLock
from harvester.agent.guest_processes import GuestProcesses
from harvester.agent.state_lock import STATE_LOCK, lock_state
from harvester.config import AgentConfig, SlotConfig
from harvester.contracts.audit import audit_files
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import ConfigError, Exhausted, Unsupported
from harvester.contracts.ids import is_name
from harvester.contracts.page import PageDirectory, PageHeld, PageName, PageReader, Pulse
from harvester.contracts.page.directory import LAUNCH_DIRECTORY
from harvester.platform.idle_groups import IdleGroups
from harvester.platform.kv_segment import KvSegment
from harvester.platform.whole_file import TEMPORARY, is_there

_RUN_KINDS = ("lease", "lifted", "release")
_RECORD_KINDS = ("journal", "journal.1", "state")


@dataclass(slots=True)
class RemovalReport:
    removed: list[Path] = field(default_factory=list)
    in_use: dict[Path, str] = field(default_factory=dict)
    """Paths that running production needs, with the reason, and the directories around them."""
    left: dict[Path, str] = field(default_factory=dict)
    """Other paths that stay, with the reason."""


def undo(config: AgentConfig, *, records: bool) -> RemovalReport:
    """`records`: audit, journals and states too. Raises ConfigError or Exhausted while an agent or
    a guest runs; then nothing is changed."""
    done, groups = RemovalReport(), IdleGroups()
    config = config.model_copy(update={"slots": (*config.slots, *_earlier_slots(config))})
    with ExitStack() as held:
        for slot in config.slots:
            _refuse_running(config, slot, held)
        # An agent's, maybe one with other pages. Root makes none: it would keep that user out.
        if os.path.lexists(lock := config.state_dir / STATE_LOCK):
            with _as_owner(lock):
                held.callback(lock_state(config.state_dir).close)
        for slot in config.slots:
            _settle(config, slot, done)
            _remove_segment(config, slot, done)
            _remove_pages(config.pages_of(slot), done)
        _remove_root(config, done)
        _remove_state(config, done, records=records)
    for group in groups.clear():
        done.removed.append(group)
    for group in groups.all():
        done.left[group] = "processes are in it; it goes with them"
    return done


def _earlier_slots(config: AgentConfig) -> list[SlotConfig]:
    """Slots that left pages or files and are no longer configured, e.g. slots of a slots file."""
    names: set[str] = set()
    for kind in ("journal", "state"):
        names |= {path.name.removesuffix(f".{kind}") for path in config.state_dir.glob(f"*.{kind}")}
    configured = {slot.name for slot in config.slots}
    found = [SlotConfig(name=name) for name in sorted(names - configured) if is_name(name)]
    pages = {config.pages_of(slot) for slot in config.slots}
    return [slot for slot in found if config.pages_of(slot) not in pages]


def _refuse_running(config: AgentConfig, slot: SlotConfig, held: ExitStack) -> None:
    path = config.pages_of(slot)
    if not _is_directory(path):
        return
    pages = PageDirectory(path, config.owners_of(slot))
    grant = pages.grant_page()
    try:
        with _as_owner(path / f".{PageName.GRANT}.lock"):
            grant.reserve()
    except PageHeld as error:
        raise ConfigError(f"slot {slot.name}: stop the agent first: {error}") from error
    held.callback(grant.close)
    with _as_owner(path / GUEST_LOCK):
        lock = GuestLock(pages)
    held.callback(lock.close)
    try:
        lock.take(timeout_s=0.0)
    except Exhausted as error:
        raise ConfigError(f"slot {slot.name}: {error}") from error


@contextmanager
def _as_owner(lock: Path) -> Iterator[None]:
    """Root opens another user's lock as that user, without root's rights."""
    if os.geteuid() or not os.path.lexists(lock):
        yield
        return
    group = os.getegid()
    os.setegid(lock.parent.stat().st_gid)
    os.seteuid(lock.lstat().st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def _settle(config: AgentConfig, slot: SlotConfig, done: RemovalReport) -> None:
    """Moves processes that an agent lifted and that still live back to where they were."""
    memo = config.file_of(slot, "lifted")
    processes = GuestProcesses(config.pages_of(slot) / PageName.GUEST, memo=memo)
    processes.settle()
    faults = [outcome.fault for outcome in processes.outcomes() if outcome.fault]
    if faults:
        done.left[memo] = "; ".join(faults)
    processes.close()


def _remove_segment(config: AgentConfig, slot: SlotConfig, done: RemovalReport) -> None:
    if slot.kvcached is None:
        return
    segment = KvSegment(slot.kvcached.guest, owners=config.owners_of(slot).guest)
    try:
        if segment.remove():
            done.removed.append(segment.path)
    except (OSError, Unsupported) as error:
        done.left[segment.path] = str(error)


def _remove_pages(path: Path, done: RemovalReport) -> None:
    if not _is_directory(path, done):
        return
    live = {name for name in PageDirectory(path).pulse_names() if _is_written(path / name)}
    names = {PageName.GRANT, PageName.GUEST, PageName.LEAVING, *PageDirectory(path).pulse_names()}
    for name in sorted(live):
        done.in_use[path / name] = "production writes it: remove its variables and restart it"
        done.in_use |= dict.fromkeys(path.glob(f".{name}.lock"), "it goes with production's page")
    for name in sorted(names - live):
        _remove(path / name, done)
        _remove(path / f".{name}.lock", done)
    _remove(path / GUEST_LOCK, done)
    _remove_directory(path, done)


def _is_written(page: Path) -> bool:
    with suppress(OSError):
        reader = PageReader(page, Pulse, owners=frozenset({page.lstat().st_uid}))
        try:
            return reader.read(now_ns=monotonic_ns()).record is not None
        finally:
            reader.close()
    return False


def _remove_root(config: AgentConfig, done: RemovalReport) -> None:
    root = config.page_root
    if not _is_directory(root, done):
        return
    for file in (config.kill_switch, config.stop_path):
        # A file elsewhere is the operator's own.
        if file.parent == root:
            _remove(file, done)
    launch = root / LAUNCH_DIRECTORY
    for lock in root.glob("GPU-*.launch"):
        _remove(lock, done)
    if _is_directory(launch, done):
        for lock in launch.glob("GPU-*.launch"):
            _remove(lock, done)
        _remove_directory(launch, done)
    _remove_directory(root, done)


def _remove_state(config: AgentConfig, done: RemovalReport, *, records: bool) -> None:
    state = config.state_dir
    if not is_there(state) or not state.is_dir():
        return
    names = ["stops.json", STATE_LOCK]
    for slot in config.slots:
        names += [f"{slot.name}.{kind}" for kind in _RUN_KINDS]
        if records:
            names += [f"{slot.name}.{kind}" for kind in _RECORD_KINDS]
            names += [path.name for path in state.glob(f"{slot.name}.state.refused*")]
    if records:
        names += [path.name for path in audit_files(config.audit_file)]
    for name in names:
        if state / name not in done.left:
            _remove(state / name, done)
            _remove(state / f"{TEMPORARY}{name}", done)
    if records or not any(state.iterdir()):
        _remove_directory(state, done)


def _remove(path: Path, done: RemovalReport, *, how: Callable[[Path], None] = Path.unlink) -> None:
    try:
        how(path)
    except FileNotFoundError:
        return
    except OSError as error:
        done.left[path] = error.strerror or str(error)
    else:
        done.removed.append(path)


def _is_directory(path: Path, done: RemovalReport | None = None) -> bool:
    """Whether it may be ours: the agent takes no link, which could lead anywhere."""
    if path.is_symlink() and done is not None:
        done.left[path] = "a link, which RoseMux never makes"
    return is_there(path) and path.is_dir() and not path.is_symlink()


def _remove_directory(path: Path, done: RemovalReport) -> None:
    """Removes only an empty directory: files in it may not be ours."""
    found = sorted(path.iterdir())
    strays = [each for each in found if each not in done.in_use]
    for stray in strays:
        done.left.setdefault(stray, "not known to be RoseMux's")
    if found and not strays:
        done.in_use[path] = "it goes with what is in it"
    else:
        _remove(path, done, how=Path.rmdir)
