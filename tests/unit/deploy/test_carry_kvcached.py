"""kvcached is compiled where all its needs are there, and refused in a line where one is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.gpu import compiling, toolkit
from deploy.gpu.parts import BundleRefused
from deploy.gpu.unpacking import INSTALLED

TREE = Path(__file__).parents[3]
CACHE = """\
3 libs found in cache `/etc/ld.so.cache'
\tlibcudart.so.13 (libc6,x86-64) => /usr/local/cuda/lib64/libcudart.so.13
\tlibcuda.so.1 (libc6) => {system}/lib32/libcuda.so.1
\tlibcuda.so.1 (libc6,x86-64) => {system}/lib64/libcuda.so.1
"""


def file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_the_driver_of_the_loaders_cache_is_linked_before_any_other(tmp_path: Path) -> None:
    file(tmp_path / "lib32/libcuda.so.1")
    file(tmp_path / "usr/local/cuda/lib64/stubs/libcuda.so")
    driver = file(tmp_path / "lib64/libcuda.so.1")
    cache = CACHE.format(system=tmp_path)
    assert toolkit.driver_library({}, cache, system=tmp_path) == driver


@pytest.mark.parametrize(
    "where",
    [
        "container/libcuda.so.1",
        "usr/local/nvidia/lib64/libcuda.so.1",
        "usr/local/cuda-13.0/compat/libcuda.so.1",
        "usr/local/cuda/lib64/stubs/libcuda.so",
        "usr/local/cuda-13.0/targets/x86_64-linux/lib/stubs/libcuda.so",
    ],
)
def test_a_driver_that_the_loaders_cache_does_not_know_is_found(where: str, tmp_path: Path) -> None:
    environment = {"LD_LIBRARY_PATH": f":{tmp_path}/nothing:{tmp_path}/container"}
    cache = CACHE.format(system=tmp_path)
    assert toolkit.driver_library(environment, cache, system=tmp_path) is None
    library = file(tmp_path / where)
    assert toolkit.driver_library(environment, cache, system=tmp_path) == library


def test_a_drivers_own_library_is_preferred_to_a_stub(tmp_path: Path) -> None:
    file(tmp_path / "usr/local/cuda/lib64/stubs/libcuda.so")
    driver = file(tmp_path / "usr/local/nvidia/lib64/libcuda.so.1")
    assert toolkit.driver_library({}, "", system=tmp_path) == driver


def test_a_wrapper_of_nvcc_is_not_taken_for_the_toolkit(tmp_path: Path) -> None:
    wrapper = file(tmp_path / "usr/local/bin/nvcc")
    with pytest.raises(
        BundleRefused, match=r"no CUDA headers: no include/cuda_runtime\.h in .*CUDA_HOME"
    ):
        toolkit.toolkit_home({}, str(wrapper), system=tmp_path)
    home = tmp_path / "usr/local/cuda-13.0"
    file(home / "include/cuda_runtime.h")
    assert toolkit.toolkit_home({}, str(wrapper), system=tmp_path) == home
    own = tmp_path / "own"
    file(own / "include/cuda_runtime.h")
    assert toolkit.toolkit_home({}, str(file(own / "bin/nvcc")), system=tmp_path) == own


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_that_is_named_is_taken_or_refused(name: str, tmp_path: Path) -> None:
    file(tmp_path / "usr/local/cuda/include/cuda_runtime.h")
    home = tmp_path / "named"
    with pytest.raises(BundleRefused, match=f"{name} is .*named, which has no include"):
        toolkit.toolkit_home({name: str(home)}, None, system=tmp_path)
    file(home / "include/cuda_runtime.h")
    assert toolkit.toolkit_home({name: str(home)}, None, system=tmp_path) == home


def test_a_machine_without_any_libcuda_is_refused_before_the_compilation(tmp_path: Path) -> None:
    file(tmp_path / "usr/local/cuda/include/cuda_runtime.h")
    compiler = file(tmp_path / "c++")
    compiler.chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    with pytest.raises(BundleRefused, match="nothing to link with"):
        compiling.build_environment(environment, cache="", system=tmp_path)
    library = file(tmp_path / "usr/local/nvidia/lib64/libcuda.so.1")
    found = compiling.build_environment(environment, cache="", system=tmp_path)
    assert found == ({**environment, "CUDA_HOME": f"{tmp_path}/usr/local/cuda"}, library)
    with pytest.raises(BundleRefused, match=r"no C\+\+ compiler here"):
        compiling.build_environment({"PATH": "/nowhere"}, cache="", system=tmp_path)


def test_a_wrong_site_and_a_foreign_directory_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compiling.main([str(tmp_path / "typo"), str(tmp_path / "there")]) == 1
    assert f"build-kvcached: {tmp_path / 'typo'} is not there; name the" in capsys.readouterr().err
    assert compiling.main([str(tmp_path), str(tmp_path / "there")]) == 1
    assert "has no sources/kvcached-*.tar.gz; name the directory" in capsys.readouterr().err
    file(tmp_path / "site/sources/kvcached-0.1.6.tar.gz")
    file(tmp_path / "site/activate")
    file(tmp_path / "site" / INSTALLED)
    assert compiling.main([str(tmp_path / "site"), str(tmp_path / "site")]) == 1
    assert "was not made by this script" in capsys.readouterr().err
    assert (tmp_path / "site/sources/kvcached-0.1.6.tar.gz").exists()


def test_the_script_without_arguments_says_its_usage() -> None:
    run = subprocess.run(
        [TREE / "deploy/gpu/build-kvcached"],
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )
    assert run.returncode == 2
    assert run.stderr.startswith("usage: deploy/gpu/build-kvcached [-h] site directory")


def test_a_failed_compilation_leaves_the_one_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = file(tmp_path / "there/activate")
    source = file(tmp_path / "kvcached-0.tar.gz")
    with pytest.raises(BundleRefused, match="pip could not build it"):
        compiling.build(source, tmp_path / "there", {"PATH": "/bin"}, tmp_path / "libcuda.so.1")
    assert "ERROR" in capfd.readouterr().err
    assert before.exists()
    assert not (tmp_path / "there.partial").exists()
