"""Missing wheels are computed from the wheels' metadata and the machine's list of packages."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName
from packaging.version import Version

from deploy.gpu import selection
from deploy.gpu.missing import Missing, missing_wheels, read_names, read_requirements
from deploy.gpu.registry import Lock, Registry, read_lock
from deploy.gpu.wheel import CarryError, Wheel, read_wheel

GPU = Path(__file__).parents[3] / "deploy/gpu"


class Shelf:
    """A registry of small wheels, newest first asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []

    def wheel(self, name: str, version: str, *requires: str) -> Wheel:
        path = self.folder / f"{name}-{version}-py3-none-any.whl"
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {each}" for each in requires]
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n\n")
        return read_wheel(path)

    def fetch(self, name: NormalizedName, specifier: SpecifierSet) -> Wheel:
        self.fetched.append(name)
        wheels = [read_wheel(path) for path in self.folder.glob(f"{name}-*.whl")]
        fitting = [each for each in wheels if specifier.contains(each.version)]
        if not fitting:
            raise CarryError(f"no wheel of {name}{specifier}")
        return max(fitting, key=lambda each: each.version)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def asked(shelf: Shelf, root: Wheel, *, present: str = "", left_out: str = "") -> Missing:
    return missing_wheels(
        [root], present=read_names(present), left_out=read_names(left_out), fetch=shelf.fetch
    )


def names(missing: Missing) -> list[str]:
    return [f"{wheel.name} {wheel.version}" for wheel in missing.wheels]


def test_requirements_of_requirements_are_missing_too(shelf: Shelf) -> None:
    shelf.wheel("web", "2.0", "socket>=1", "numpy")
    shelf.wheel("socket", "1.5")
    root = shelf.wheel("engine", "1.0", "web", "numpy>=2")
    missing = asked(shelf, root, present="numpy==2.5.2")
    assert names(missing) == ["socket 1.5", "web 2.0"]
    assert not missing.mismatches


def test_a_present_distribution_is_named_by_any_spelling(shelf: Shelf) -> None:
    root = shelf.wheel("engine", "1.0", "prometheus_client", "PyYAML")
    assert not asked(shelf, root, present="prometheus-client\npyyaml").wheels


def test_a_marker_for_another_machine_asks_for_nothing(shelf: Shelf) -> None:
    shelf.wheel("six", "1.17")
    root = shelf.wheel(
        "engine", "1.0", 'winpipe; sys_platform == "win32"', 'six; python_version > "3.11"'
    )
    assert names(asked(shelf, root)) == ["six 1.17"]


def test_an_extra_brings_its_requirements_and_no_other_extra_does(shelf: Shelf) -> None:
    shelf.wheel("web", "1.0", 'loop; extra == "standard"', 'docs; extra == "docs"')
    shelf.wheel("loop", "3.0")
    root = shelf.wheel("engine", "1.0", "web[standard]")
    assert names(asked(shelf, root)) == ["loop 3.0", "web 1.0"]


def test_a_bound_found_later_replaces_what_was_fetched_before(shelf: Shelf) -> None:
    shelf.wheel("web", "2.0", "old==1.0")
    shelf.wheel("old", "1.0", "gone")
    shelf.wheel("old", "2.0", "new")
    shelf.wheel("new", "1.0")
    shelf.wheel("gone", "1.0")
    root = shelf.wheel("engine", "1.0", "old", "web")
    assert names(asked(shelf, root)) == ["gone 1.0", "old 1.0", "web 2.0"]


def test_a_left_out_package_is_named_and_its_requirements_do_not_travel(shelf: Shelf) -> None:
    root = shelf.wheel("engine", "1.0", "flash==0.6")
    missing = asked(shelf, root, left_out="flash  # sampler\nother")
    assert missing.left_out == ("flash",)
    assert not missing.wheels
    assert not shelf.fetched


def test_a_present_version_outside_a_bound_is_reported_and_not_carried(shelf: Shelf) -> None:
    root = shelf.wheel("engine", "1.0", "setuptools<81", "numba==0.65.0", "tqdm>=1")
    missing = asked(shelf, root, present="setuptools==81.0.0\nnumba\ntqdm")
    assert not missing.wheels
    assert [str(each) for each in missing.mismatches] == [
        "numba is there in an unknown version, required ==0.65.0 by engine",
        "setuptools is 81.0.0, required <81 by engine",
    ]


def test_a_replaced_requirement_stands_in_the_place_of_two_that_exclude_each_other(
    shelf: Shelf,
) -> None:
    shelf.wheel("ffi", "0.10")
    shelf.wheel("ffi", "0.15")
    shelf.wheel("grammar", "1.0", "ffi>=0.11")
    root = shelf.wheel("engine", "1.0", "ffi==0.10", "grammar")
    with pytest.raises(CarryError, match="no wheel of ffi"):
        asked(shelf, root)
    missing = missing_wheels(
        [root],
        present={},
        left_out=(),
        replaced=read_requirements("ffi>=0.11  # reason\n"),
        fetch=shelf.fetch,
    )
    assert names(missing) == ["ffi 0.15", "grammar 1.0"]


def test_a_wheel_of_another_torch_is_refused(shelf: Shelf) -> None:
    root = shelf.wheel("vllm", "0.24.0", "torch==2.10.0")
    selection.refuse_another_torch(root, read_names("torch==2.10.0"))
    with pytest.raises(CarryError, match=r"wants torch==2\.10\.0, the machine has torch 2\.11\.0"):
        selection.refuse_another_torch(root, read_names("torch==2.11.0"))


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "torn-1.0-py3-none-any.whl"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(CarryError, match=r"torn-1\.0"):
        read_wheel(path)


def lock_of(wheel: Wheel, content: bytes) -> Lock:
    digest = hashlib.sha256(content).hexdigest()
    return read_lock(f"{wheel.name}=={wheel.version} \\\n    --hash=sha256:{digest}\n    # via x\n")


def test_the_version_of_the_lock_is_taken_before_a_newer_one(shelf: Shelf) -> None:
    tested = shelf.wheel("msgspec", "0.19.0")
    shelf.wheel("msgspec", "0.22.0")
    registry = Registry(shelf.folder, lock_of(tested, tested.path.read_bytes()))
    assert registry.fetch(tested.name, SpecifierSet(">=0.18")).version == Version("0.19.0")
    assert registry.fetch(tested.name, SpecifierSet(">=0.20")).version == Version("0.22.0")


def test_another_file_of_a_locked_version_is_refused(shelf: Shelf) -> None:
    wheel = shelf.wheel("msgspec", "0.19.0")
    registry = Registry(shelf.folder, lock_of(wheel, b"another"))
    with pytest.raises(CarryError, match="not the file that the lock names"):
        registry.fetch(wheel.name, SpecifierSet())


def test_rosemux_asks_for_its_dependencies_and_what_its_tests_import() -> None:
    pyproject = (GPU.parents[1] / "pyproject.toml").read_text()
    found = {each.name for each in selection.rosemux_requirements(pyproject)}
    assert {"msgspec", "zstandard", "pytest-asyncio", "fsspec", "numba", "numpy"} <= found
    assert not {"ruff", "torch", "vllm"} & found


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("present.txt", read_names),
        ("left_out.txt", read_names),
        ("replaced.txt", read_requirements),
    ],
)
def test_the_lists_of_the_project_can_be_read(file: str, read: Callable[[str], object]) -> None:
    assert read((GPU / file).read_text())


def test_nothing_is_both_present_and_left_out() -> None:
    lists = [read_names((GPU / name).read_text()) for name in ("present.txt", "left_out.txt")]
    assert not lists[0].keys() & lists[1].keys()
    assert lists[0]["torch"] == Version("2.11.0")  # type: ignore[index]


def test_requirements_from_the_command_line_are_fetched(shelf: Shelf) -> None:
    shelf.wheel("msgspec", "0.19")
    missing = missing_wheels(
        [], [Requirement("msgspec>=0.18")], present={}, left_out=(), fetch=shelf.fetch
    )
    assert names(missing) == ["msgspec 0.19"]
