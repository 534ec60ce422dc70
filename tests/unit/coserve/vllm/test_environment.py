"""Meaning of the three environment variables of a slot."""

from collections.abc import Callable
from pathlib import Path

import pytest

from coserve.vllm.environment import Role, SlotEnvironment, slot_environment
from harvester.contracts.errors import ConfigError
from harvester.contracts.isolation import IsolationBackend

SetRole = Callable[[str, Path], None]


def test_without_a_role_a_process_belongs_to_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSEMUX_ROLE", raising=False)
    monkeypatch.setenv("ROSEMUX_PAGE_DIR", "/nowhere")
    assert slot_environment() is None


def test_reads_role_engine_and_directory(set_role: SetRole, tmp_path: Path) -> None:
    set_role("guest", tmp_path)
    assert slot_environment() == SlotEnvironment(Role.GUEST, "prod", tmp_path)


def test_names_the_roles_when_the_role_is_unknown(set_role: SetRole, tmp_path: Path) -> None:
    set_role("prodution", tmp_path)
    with pytest.raises(ConfigError, match="use production or guest"):
        slot_environment()


def test_a_guest_needs_its_directory(set_role: SetRole, tmp_path: Path) -> None:
    set_role("guest", tmp_path / "not_made")
    with pytest.raises(ConfigError, match="ROSEMUX_PAGE_DIR"):
        slot_environment()


def test_production_starts_before_the_agent_has_made_the_directory(
    set_role: SetRole, tmp_path: Path
) -> None:
    set_role("production", tmp_path / "not_made")
    assert slot_environment() == SlotEnvironment(Role.PRODUCTION, "prod", tmp_path / "not_made")


@pytest.mark.parametrize("engine", ["a.b", "a/b", "", "x" * 60])
def test_an_engine_name_that_no_page_can_bear_is_refused(
    set_role: SetRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    set_role("production", tmp_path)
    monkeypatch.setenv("ROSEMUX_ENGINE", engine)
    with pytest.raises(ConfigError, match="ROSEMUX_ENGINE"):
        slot_environment()


@pytest.mark.parametrize(
    ("name", "index"), [("MainProcess", 0), ("ApiServer_0", 0), ("ApiServer_3", 3)]
)
def test_the_process_index_is_vllms(
    set_role: SetRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, index: int
) -> None:
    import multiprocessing

    monkeypatch.setattr(multiprocessing.current_process(), "name", name)
    set_role("production", tmp_path)
    environment = slot_environment()
    assert environment is not None
    assert environment.process == index


def test_a_guest_says_what_it_is_isolated_by(
    set_role: SetRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_role("guest", tmp_path)
    monkeypatch.setenv("ROSEMUX_ISOLATION", "time-slicing")
    found = slot_environment()
    assert found is not None
    assert found.isolation is IsolationBackend.TIME_SLICING
    monkeypatch.setenv("ROSEMUX_ISOLATION", "green-contexts")
    with pytest.raises(ConfigError, match="use idle-group, idle, time-slicing, mps, none"):
        slot_environment()
    monkeypatch.setenv("ROSEMUX_ISOLATION", "mps")
    with pytest.raises(ConfigError, match="CUDA_MPS_PIPE_DIRECTORY"):
        slot_environment()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/nvidia-mps")
    found = slot_environment()
    assert found is not None
    assert found.isolation is IsolationBackend.MPS
