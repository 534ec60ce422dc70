"""Files that Hopper does not load leave the bundle, and so does the code of other GPUs."""

import struct
from pathlib import Path

import pytest

from deploy.gpu.fatbin import CodeKind, containers, keep_one_architecture
from deploy.gpu.stripping import strip
from deploy.gpu.wheel import CarryError

PTX, CODE = CodeKind.PTX, CodeKind.MACHINE_CODE
Payloads = dict[tuple[CodeKind, int], bytes]


def library(*payloads: Payloads) -> bytearray:
    """An ELF file of which only the section `.nv_fatbin` means something."""
    section = b"".join(container(each) for each in payloads)
    names = b"\0.nv_fatbin\0.shstrtab\0"
    start = 64
    table = start + len(section) + len(names)
    header = b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", table) + bytes(10)
    header = header[:0x28] + struct.pack("<Q", table) + bytes(10) + struct.pack("<HHH", 64, 3, 2)
    sections = [bytes(64)]
    for name, at, length in [(1, start, len(section)), (12, start + len(section), len(names))]:
        sections.append(struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, length, 0, 0, 8, 0))
    return bytearray(header + section + names + b"".join(sections))


def container(payloads: Payloads) -> bytes:
    body = b"".join(
        struct.pack("<HHIQ12xI", kind, 0x101, 64, len(payload), architecture) + bytes(32) + payload
        for (kind, architecture), payload in payloads.items()
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def payload(character: str) -> bytes:
    return character.encode() * 24


def left(content: bytearray) -> list[list[tuple[int, int]]]:
    """Kind and architecture of the entries that still have their bytes, container by container."""
    return [
        [
            (each.kind, each.architecture)
            for each in entries
            if any(content[each.start : each.start + each.length_bytes])
        ]
        for entries in containers(content)
    ]


def test_machine_code_of_other_gpus_is_zeroed_in_place() -> None:
    content = library(
        {
            (CODE, 80): payload("a"),
            (CODE, 90): payload("h"),
            (CODE, 120): payload("b"),
            (PTX, 90): payload("p"),
        }
    )
    before = bytes(content)
    assert keep_one_architecture(content) == 72
    assert len(content) == len(before)
    assert left(content) == [[(CODE, 90)]]
    assert payload("h") in content
    assert [len(entries) for entries in containers(content)] == [4]


def test_a_kernel_without_code_for_the_gpu_keeps_the_newest_ptx_it_can_compile() -> None:
    content = library(
        {(PTX, 75): payload("o"), (PTX, 80): payload("p"), (PTX, 100): payload("n")},
        {(CODE, 90): payload("h")},
    )
    keep_one_architecture(content)
    assert left(content) == [[(PTX, 80)], [(CODE, 90)]]


def test_a_kernel_of_newer_gpus_alone_loses_all() -> None:
    content = library({(CODE, 100): payload("n"), (PTX, 120): payload("n")})
    keep_one_architecture(content)
    assert left(content) == [[]]


def test_a_library_without_cuda_is_left_as_it_is() -> None:
    content = library()
    before = bytes(content)
    assert keep_one_architecture(content) == 0
    assert content == before


def test_a_damaged_section_is_refused_and_nothing_is_written_past_it() -> None:
    content = library({(CODE, 80): payload("a")})
    at = content.index(struct.pack("<HH", 2, 0x101))
    struct.pack_into("<Q", content, at + 8, 1 << 40)
    with pytest.raises(CarryError, match="behind its container"):
        keep_one_architecture(content)
    with pytest.raises(CarryError, match="not a little-endian"):
        keep_one_architecture(bytearray(b"MZ"))


def site(folder: Path) -> Path:
    for name in (
        "vllm/vllm-rs",
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/third_party/deep_gemm/a.hpp",
        "vllm/third_party/pynvml.py",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/envs.py",
        "xgrammar/lib/libxgrammar.a",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 10)
    for name in ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"):
        (folder / name).write_bytes(library({(CODE, 80): payload("a"), (CODE, 90): payload("h")}))
    return folder


def test_stripping_keeps_what_a_dense_model_on_hopper_loads(tmp_path: Path) -> None:
    done = strip(site(tmp_path))
    kept = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert kept == [
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/envs.py",
        "vllm/third_party/pynvml.py",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    ]
    assert done.removed_bytes == 50
    assert done.zeroed_bytes == 48
    assert left(bytearray((tmp_path / kept[0]).read_bytes())) == [[(CODE, 90)]]


def test_all_gpus_stay_on_request(tmp_path: Path) -> None:
    assert strip(site(tmp_path), every_architecture=True).zeroed_bytes == 0
    content = bytearray((tmp_path / "vllm/_C_stable_libtorch.abi3.so").read_bytes())
    assert left(content) == [[(CODE, 80), (CODE, 90)]]
