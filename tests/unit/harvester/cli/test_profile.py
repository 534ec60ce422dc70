"""`rosemux profile` prints what a slot's policy can start from."""

from pathlib import Path

import pytest
import yaml

from harvester.cli import main
from harvester.config import SlotConfig
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import Calibration, PageDirectory, ProductionModel, Pulse

HOUR_NS = 3_600_000_000_000
ONE = ProductionModel(
    prefill_base_s=0.02, prefill_s_per_token=1e-4, decode_base_s=0.01, decode_s_per_request=1e-3
)
OTHER = ProductionModel(
    prefill_base_s=0.01, prefill_s_per_token=2e-4, decode_base_s=0.01, decode_s_per_request=5e-4
)
HELD = Calibration(steps=512, over_ratio=0.12, p50_ratio=0.8, p90_ratio=1.04, p99_ratio=1.5)


SHAPE = "Qwen2ForCausalLM 48x5120 bfloat16 tp4 pp1 on NVIDIA H100 80GB HBM3"


def pulse(pages: Path, process: int, model: ProductionModel, *, samples: int = 1000) -> None:
    writer = PageDirectory.create(pages).pulse_writer("production", process)
    record = Pulse(model=model, model_samples=samples, decode_calibration=HELD, shape=SHAPE)
    writer.write(record, now_ns=monotonic_ns(), ttl_ns=HOUR_NS)
    writer.close()


def profiled(pages: Path, *more: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["profile", "--pages", str(pages), "--seconds", "0", *more])
    return int(left.value.code or 0)


def test_the_printed_profile_is_a_slot_s_policy_with_the_upper_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pulse(tmp_path / "slot", 0, ONE)
    pulse(tmp_path / "slot", 1, OTHER)
    assert profiled(tmp_path / "slot", "--out", str(tmp_path / "profile.yaml")) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "profile.yaml").read_text() == printed
    given = SlotConfig(name="slot", **yaml.safe_load(printed)).policy.profile
    assert (given.prefill_base_s, given.prefill_s_per_token) == (0.02, 2e-4)
    assert (given.decode_base_s, given.decode_s_per_request) == (0.01, 1e-3)
    assert given.shapes == (SHAPE,)


def test_the_directory_of_all_slots_is_answered_with_the_slots_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pulse(tmp_path / "slot1", 0, ONE)
    pulse(tmp_path / "slot0", 0, ONE)
    PageDirectory.create(tmp_path / "silent")
    (tmp_path / "notes.txt").touch()
    assert profiled(tmp_path) == 2
    shown = capsys.readouterr().err
    assert shown.rstrip().endswith(f": name {tmp_path}/slot0 or {tmp_path}/slot1")
    assert profiled(tmp_path / "silent") == 2
    assert "start production with its pulse first" in capsys.readouterr().err


def test_says_how_well_the_times_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pulse(tmp_path, 0, ONE)
    assert profiled(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "pulse.production.0 prefills: none compared yet" in printed
    held = "pulse.production.0 decodes: P50 0.80, P90 1.04, P99 1.50 of 512, 12% longer"
    assert held in printed


def test_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profiled(tmp_path) == 2
    assert "no pulse" in capsys.readouterr().err
    pulse(tmp_path, 0, ONE)
    pulse(tmp_path, 1, OTHER, samples=3)
    assert profiled(tmp_path) == 1
    assert "too few steps" in capsys.readouterr().err
    (tmp_path / "pulse.production.1").write_bytes(b"x" * 4096)
    assert profiled(tmp_path) == 2
    assert "is no pulse" in capsys.readouterr().err
