"""Another configuration over a recorded slot journal: times by reason, tokens, and their limits."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from harvester.contracts.errors import Corrupt, Unsupported
from harvester.contracts.ids import Epoch
from harvester.contracts.journal import JournalWriter, Opened, config_hash
from harvester.contracts.page import Guest, PageFault, Pulse
from harvester.policy.sample import GuestReading, LeaseView, PulseReading, SlotSample
from harvester.policy.settings import Mode, ProofSettings, SlotSettings
from harvester.policy.slot import SlotPolicy
from scheduler.sim.what_if import what_if

SETTINGS = SlotSettings(cooldown_s=5.0, proof=ProofSettings(share_ratio=0.0))
BEAT_S = 0.1
TOKENS = 30


class Recorded:
    """A slot whose production falls silent for a second, a minute into its journal."""

    def __init__(self, path: Path, settings: SlotSettings, *, guest: bool = True) -> None:
        self.path = path
        self.policy = SlotPolicy(settings)
        self.policy.begin("life")
        self._guest = guest
        self._writer = JournalWriter(path, packed=True)
        self._now, self._beats = 1000.0, 0
        self.open()

    def open(self) -> None:
        config = msgspec.to_builtins(self.policy.settings)
        opened = Opened(
            actor="agent:slot0",
            policy=SlotPolicy.NAME,
            config=config,
            config_hash=config_hash(config),
            snapshot=self.policy.snapshot(),
        )
        self._writer.opened(opened)

    def beats(self, count: int, *, silent: bool = False) -> None:
        for _ in range(count):
            pulse = PulseReading(
                name="pulse.prod.0",
                record=None if silent else Pulse(model_samples=1000),
                fault=PageFault.EXPIRED if silent else None,
            )
            steps = self._beats
            record = Guest(steps_finished=steps, tokens_total=steps * TOKENS)
            guest = GuestReading(record=record) if self._guest else GuestReading(fault=None)
            lease = LeaseView(epoch=Epoch(1), lease="slot0.1" if self._guest else None)
            sample = SlotSample(pulses=(pulse,), guest=guest, lease=lease)
            effects = self.policy.observe(sample, now=self._now)
            self._writer.decided(now=self._now, sample=sample, effects=effects)
            self._now, self._beats = self._now + BEAT_S, self._beats + 1

    def wait(self, seconds: float) -> None:
        self._now += seconds

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slot0.journal"


@pytest.fixture
def recorded(path: Path) -> Recorded:
    journal = Recorded(path, SETTINGS)
    journal.beats(300)
    journal.beats(10, silent=True)
    journal.beats(300)
    journal.close()
    return journal


def changed(**fields: Any) -> SlotSettings:
    return msgspec.convert({**msgspec.to_builtins(SETTINGS), **fields}, SlotSettings)


def test_the_same_settings_change_nothing(recorded: Recorded) -> None:
    found = what_if(recorded.path, SETTINGS)
    assert found.recorded == found.changed
    assert found.differing == ()
    assert found.span_s == pytest.approx(60.9, abs=0.2)
    assert found.recorded.closed_s["cooling"] == pytest.approx(4.9, abs=0.3)
    assert found.recorded.closed_s["silent"] == pytest.approx(1.0, abs=0.2)


def test_a_longer_cool_down_moves_time_from_grantable_to_cooling(recorded: Recorded) -> None:
    found = what_if(recorded.path, changed(cooldown_s=20.0))
    lost_s = found.recorded.grantable_s - found.changed.grantable_s
    more_s = found.changed.closed_s["cooling"] - found.recorded.closed_s["cooling"]
    assert lost_s == pytest.approx(15.0, abs=0.3)
    assert more_s == pytest.approx(15.0, abs=0.3)
    assert found.differing == ("cooldown_s: 5.0 -> 20.0",)


def test_tokens_follow_the_guest_s_own_pace(recorded: Recorded) -> None:
    found = what_if(recorded.path, changed(cooldown_s=20.0))
    assert found.guest_tokens == pytest.approx(608 * TOKENS, abs=2 * TOKENS)
    assert found.recorded.tokens == pytest.approx(found.guest_tokens)
    share = found.changed.grantable_s / found.recorded.grantable_s
    assert found.changed.tokens == pytest.approx(found.recorded.tokens * share)


def test_a_journal_of_observe_is_judged_without_lease_and_guest(path: Path) -> None:
    journal = Recorded(path, changed(mode=Mode.OBSERVE), guest=False)
    journal.beats(300)
    journal.beats(10, silent=True)
    journal.beats(300)
    journal.close()
    found = what_if(path, changed(mode=Mode.HARVEST, cooldown_s=20.0))
    assert found.recorded.grantable_s == pytest.approx(55.0, abs=0.5)
    assert found.changed.grantable_s == pytest.approx(40.0, abs=0.5)
    assert found.guest_tokens is None


def test_a_slot_that_the_new_file_switches_off_grants_nothing(recorded: Recorded) -> None:
    found = what_if(recorded.path, changed(mode=Mode.OFF))
    assert found.changed.grantable_s == 0.0
    assert found.changed.closed_s["killed"] == pytest.approx(found.span_s)


def test_time_without_decisions_is_a_gap_of_neither_account(path: Path) -> None:
    journal = Recorded(path, SETTINGS)
    journal.beats(100)
    journal.wait(3600.0)
    journal.beats(100)
    journal.close()
    found = what_if(path, SETTINGS)
    assert found.gaps_s == pytest.approx(3600.0, abs=1.0)
    assert found.span_s == pytest.approx(20.0, abs=1.0)


@pytest.mark.parametrize(("runs", "expected_s"), [(1, 20.0), (2, 8.0)])
def test_a_reload_ends_no_cool_down_and_a_restart_takes_what_the_agent_remembered(
    path: Path, runs: int, expected_s: float
) -> None:
    journal = Recorded(path, SETTINGS)
    journal.beats(100)
    journal.beats(2, silent=True)
    journal.beats(80)
    journal.policy = SlotPolicy(SETTINGS)
    for _ in range(runs):
        journal.policy.begin("life")
    journal.open()
    journal.beats(300)
    journal.close()
    cooling_s = what_if(path, changed(cooldown_s=20.0)).changed.closed_s["cooling"]
    assert cooling_s == pytest.approx(expected_s, abs=0.3)


def test_a_journal_of_another_policy_is_refused(path: Path) -> None:
    writer = JournalWriter(path)
    writer.opened(Opened(actor="x", policy="other", config={}, config_hash=config_hash({})))
    writer.close()
    with pytest.raises(Unsupported, match="line 1: a journal of other"):
        what_if(path, SETTINGS)
    path.write_bytes(b"")
    with pytest.raises(Corrupt, match="no line is whole"):
        what_if(path, SETTINGS)


def ran(*arguments: str) -> tuple[int, str]:
    from scheduler.sim.simulate_commands import replay

    app = typer.Typer()
    app.command()(replay)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_the_command_prints_both_accounts_and_what_it_cannot_know(
    recorded: Recorded, tmp_path: Path
) -> None:
    config = tmp_path / "new.yaml"
    policy = "{cooldown_s: 20, epsilon: 0.1, proof: {share_ratio: 0}}"
    slots = f"[{{name: slot0, policy: {policy}}}, {{name: other}}]"
    config.write_text(f"mode: harvest\nunsafe_experiments: true\nslots: {slots}")
    code, out = ran(str(recorded.path), "--config", str(config))
    assert code == 0
    rows = {line.split("  ")[0].strip(): line.split() for line in out.splitlines()}
    assert rows["closed: cooling"][-2:] == ["+15.0", "s"]
    assert "guest tokens, at its recorded pace" in out
    assert "cooldown_s: 5.0 -> 20.0" in out
    assert "not in these figures: epsilon" in out


def test_the_command_says_that_a_tail_is_torn(recorded: Recorded) -> None:
    content = recorded.path.read_bytes()
    recorded.path.write_bytes(content[:-9])
    code, out = ran(str(recorded.path))
    assert code == 0
    assert "bytes are torn and left out" in out
    assert "identical: 609 decisions" in out
