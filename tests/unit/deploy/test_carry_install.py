"""A bundle packed here becomes a directory of packages there, with nothing but Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.gpu import itinerary, kernels, packing, parts, unpacking

TREE = Path(__file__).parents[3]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Two packages, a script and a large file, in parts of at most 4 KiB."""
    site = tmp_path / "laid-out"
    (site / "engine").mkdir(parents=True)
    (site / "bin").mkdir()
    (site / "engine/__init__.py").write_text("NAME = 'carried'\n")
    (site / "engine/_C.so").write_bytes(os.urandom(9000))
    (site / "bin/engine").write_text("#!/elsewhere/bin/python3.11\nprint('served')\n")
    (site / "bin/engine").chmod(0o755)
    folder = tmp_path / "bundle"
    folder.mkdir()
    packing.pack(site, folder, "engine-1.0", limit_bytes=4096)
    return folder


def carried(bundle: Path, there: Path) -> Path:
    assert unpacking.main(["join", str(bundle), str(there / "parts")]) == 0
    assert unpacking.main(["install", str(there / "parts"), str(there / "site")]) == 0
    return there / "site"


def python(site: Path, code: str) -> str:
    script = f'. "{site}/activate" && exec "{sys.executable}" -c "$0"'
    run = subprocess.run(
        ["bash", "-c", script, code], check=True, capture_output=True, text=True, cwd="/"
    )
    return run.stdout.strip()


def test_the_same_files_give_the_same_parts(bundle: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    os.utime(tmp_path / "laid-out/engine/__init__.py", (1, 1))
    packing.pack(tmp_path / "laid-out", again, "engine-1.0", limit_bytes=4096)
    assert parts.read_manifest(again) == parts.read_manifest(bundle)
    assert len(parts.read_manifest(bundle).parts) == 3


def test_an_installed_bundle_is_imported_once_activated(bundle: Path, tmp_path: Path) -> None:
    site = carried(bundle, tmp_path / "there")
    assert (site / "engine/_C.so").read_bytes() == (tmp_path / "laid-out/engine/_C.so").read_bytes()
    assert python(site, "import engine; print(engine.NAME)") == "carried"


def test_scripts_run_with_the_python_that_installed_them(bundle: Path, tmp_path: Path) -> None:
    site = carried(bundle, tmp_path / "there")
    run = subprocess.run([site / "bin/engine"], check=True, capture_output=True, text=True)
    assert run.stdout == "served\n"


def test_vllm_finds_the_entry_points_of_the_tree(bundle: Path, tmp_path: Path) -> None:
    site = carried(bundle, tmp_path / "there")
    code = (
        "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        "from importlib.metadata import entry_points, version\n"
        "print(version('rosemux'), *sorted(p.name for p in "
        "entry_points(group='vllm.general_plugins') if p.name.startswith('rosemux')))"
    )
    assert python(site, code) == "0.1.0 rosemux_coserve rosemux_weightsync"
    assert (site / "bin/rosemux").stat().st_mode & 0o111


def test_the_directory_and_what_was_set_before_are_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "with space").mkdir()
    text = unpacking.activation(tmp_path / "with space", TREE, {"VLLM_X": "a b"})
    (tmp_path / "activate").write_text(text)
    run = subprocess.run(
        ["bash", "-euc", '. "$0"; echo "$PYTHONPATH|$VLLM_X"', tmp_path / "activate"],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": "/before", "PATH": "/bin"},
    )
    assert run.stdout.strip() == f"{tmp_path}/with space:{TREE}:/before|a b"


def test_a_missing_part_is_named_and_nothing_is_installed(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle / "part-2").unlink()
    there = tmp_path / "there"
    assert unpacking.main(["join", str(bundle), str(there / "parts")]) == 0
    assert "2 of 3 parts; still missing: part-2" in capsys.readouterr().out
    assert unpacking.main(["install", str(there / "parts"), str(there / "site")]) == 1
    assert "missing or torn: part-2" in capsys.readouterr().err
    assert not (there / "site").exists()


def test_a_torn_part_ends_the_join(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle / "part-3").write_bytes(b"short")
    assert unpacking.main(["join", str(bundle), str(tmp_path / "parts")]) == 1
    assert "part-3 is torn: 5 of" in capsys.readouterr().err


def test_installing_twice_does_nothing_and_another_directory_is_left_alone(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = carried(bundle, tmp_path / "there")
    (site / "mark").touch()
    carried(bundle, tmp_path / "there")
    assert (site / "mark").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis").touch()
    arguments = ["install", str(tmp_path / "there/parts"), str(tmp_path / "mine")]
    assert unpacking.main(arguments) == 1
    assert "something else" in capsys.readouterr().err
    assert list((tmp_path / "mine").iterdir()) == [tmp_path / "mine/thesis"]


def test_installing_again_from_a_tree_that_has_moved_names_the_new_one(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "pyproject.toml").write_text('[project]\nname = "rosemux"\nversion = "0.1.0"\n')
    site = carried(bundle, tmp_path / "there")
    assert f":{TREE}" in (site / "activate").read_text()
    monkeypatch.setattr(unpacking, "TREE", moved)
    carried(bundle, tmp_path / "there")
    assert f":{moved}" in (site / "activate").read_text()
    assert str(TREE) not in (site / "activate").read_text()


def test_the_scripts_need_nothing_that_the_bundle_brings(bundle: Path, tmp_path: Path) -> None:
    """-S leaves out all installed packages."""
    for command in (
        ["join", str(bundle), str(tmp_path / "parts")],
        ["install", str(tmp_path / "parts"), str(tmp_path / "site")],
    ):
        subprocess.run(
            [sys.executable, "-S", "-m", "deploy.gpu.unpacking", *command],
            check=True,
            cwd=TREE,
            env={"PYTHONPATH": ""},
            capture_output=True,
        )


def test_each_part_has_its_go_and_the_last_installs(bundle: Path) -> None:
    text = itinerary.text(bundle, parts.read_manifest(bundle), TREE)
    assert [line.partition(":")[0] for line in text.splitlines() if line.startswith("go ")] == [
        "go 1",
        "go 2",
        "go 3",
    ]
    (install,) = [line for line in text.splitlines() if "deploy/gpu/install" in line]
    assert text.index("part-3") < text.index(install)
    assert install.endswith("deploy/gpu/check")
    assert "build-kvcached" in text


def test_the_reference_of_attention_is_causal_and_grouped() -> None:
    """The probes themselves need a GPU; what they compare with does not."""
    torch = pytest.importorskip("torch")
    query, key, value = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    out = kernels.attention(query, key, value)
    torch.testing.assert_close(out[0], value[0].repeat_interleave(2, 0))
    scores = (query[4, 3] @ key[:, 1].T) * 8**-0.5
    torch.testing.assert_close(out[4, 3], scores.softmax(-1) @ value[:, 1])
