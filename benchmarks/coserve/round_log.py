"""The measured rounds of a run, one line each in a file beside its JSON, so that a run can resume.

A piece of a run begins with a line of its plan and origin. Pieces are mixed only where both are the
same: other requests, another machine or another commit would be another figure.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.coserve.arms import Arm
from benchmarks.coserve.rounds import ArmSlice
from benchmarks.testbed.calibration import TARGET_BUSY_SHARE
from benchmarks.testbed.excerpt import TokenScale
from benchmarks.testbed.origin import Origin
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slo import ServiceLevel
from harvester.contracts.clock import wall_time_utc
from harvester.contracts.errors import ConfigError


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The question of a run, as the command line puts it."""

    trace: str
    seed: int
    slice_s: float
    rounds: int
    arms: tuple[Arm, ...]
    slo_ms: tuple[float, float] | None = None
    """TTFT and ITL; None lets the first piece choose it before its first round."""
    proven: bool = False
    """Whether the slot proves itself before the first round."""
    busy_share: float = TARGET_BUSY_SHARE
    """Busy share of production alone at which the replay aims."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Found before the first round, and the same in every piece."""

    sizes: TokenScale
    rate: float
    """Requests per second."""
    level: ServiceLevel


class RunPiece(msgspec.Struct, frozen=True, kw_only=True, tag="piece"):
    settings: RunSettings
    origin: Origin
    plan: Plan
    began: str
    """UTC time, as ISO 8601."""


class ProvingSlice(msgspec.Struct, frozen=True, kw_only=True, tag="proving"):
    """A part of the time in which the slot proved itself, before the first round."""

    measured: ArmSlice
    requests: tuple[ProductionRequest, ...]


class MeasuredRound(msgspec.Struct, frozen=True, kw_only=True, tag="round"):
    number: int
    slices: tuple[ArmSlice, ...]
    """In the order in which the arms ran."""
    requests: tuple[ProductionRequest, ...]


_Line = RunPiece | ProvingSlice | MeasuredRound


@dataclass(slots=True)
class RoundLog:
    file: Path
    settings: RunSettings
    origin: Origin
    pieces: list[RunPiece] = field(default_factory=list)
    proving: list[ProvingSlice] = field(default_factory=list)
    rounds: list[MeasuredRound] = field(default_factory=list)

    def resume(self) -> None:
        """Read earlier pieces, if any. Raises ConfigError where they are of something else."""
        if not self.file.exists():
            return
        # A line without its end is a round that was being written when its run was killed.
        whole = self.file.read_bytes().rpartition(b"\n")[0]
        try:
            lines = msgspec.json.Decoder(_Line).decode_lines(whole)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.file} holds no rounds of this version: {error}") from error
        self.pieces = [line for line in lines if isinstance(line, RunPiece)]
        self.proving = [line for line in lines if isinstance(line, ProvingSlice)]
        self.rounds = [line for line in lines if isinstance(line, MeasuredRound)]
        if [each.number for each in self.rounds] != list(range(len(self.rounds))):
            raise ConfigError(f"{self.file} lacks rounds: take another --json")
        for piece in self.pieces:
            self._check(piece.settings, self.settings)
            self._check(piece.origin, self.origin)
        # The next line must not continue a torn one.
        self.file.write_bytes(whole + b"\n" * bool(whole))

    @property
    def agent_state(self) -> Path:
        """State of the shipped agent: its guards go on from piece to piece."""
        return self.file.with_suffix(".agent")

    @property
    def plan(self) -> Plan | None:
        return self.pieces[0].plan if self.pieces else None

    @property
    def is_complete(self) -> bool:
        return len(self.rounds) >= self.settings.rounds

    def begin(self, plan: Plan) -> None:
        """A new piece; without earlier ones the file and the agent's state begin anew."""
        if not self.pieces:
            self.file.write_bytes(b"")
            shutil.rmtree(self.agent_state, ignore_errors=True)
        began = wall_time_utc()
        piece = RunPiece(settings=self.settings, origin=self.origin, plan=plan, began=began)
        self.pieces.append(piece)
        self._write(piece)

    def prove(self, measured: ArmSlice, requests: Sequence[ProductionRequest]) -> None:
        self.proving.append(ProvingSlice(measured=measured, requests=tuple(requests)))
        self._write(self.proving[-1])

    def add(self, slices: Sequence[ArmSlice], requests: Sequence[ProductionRequest]) -> None:
        measured = MeasuredRound(
            number=len(self.rounds), slices=tuple(slices), requests=tuple(requests)
        )
        self.rounds.append(measured)
        self._write(measured)

    @property
    def slices(self) -> list[ArmSlice]:
        return [each for measured in self.rounds for each in measured.slices]

    @property
    def requests(self) -> list[ProductionRequest]:
        return [each for measured in self.rounds for each in measured.requests]

    def _write(self, line: _Line) -> None:
        with self.file.open("ab") as lines:
            lines.write(msgspec.json.encode(line) + b"\n")

    def _check(self, before: msgspec.Struct, now: msgspec.Struct) -> None:
        for name in before.__struct_fields__:
            old, new = getattr(before, name), getattr(now, name)
            if old != new:
                raise ConfigError(
                    f"{self.file} has rounds of {name} {old!r}, and this run is of {new!r}: pieces "
                    "of unlike runs are not mixed; measure as before, or take another --json"
                )
