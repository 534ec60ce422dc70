"""The bytes of the three pages, which engines and agents of neighbouring versions share."""

from pathlib import Path

import pytest

from harvester.contracts.page import (
    PAGE_BYTES,
    Grant,
    GrantMode,
    Guest,
    PageReader,
    PageWriter,
    ProductionModel,
    Pulse,
    Record,
)

NOW_NS, TTL_NS = 1_000_000_000_000, 500_000_000

GRANT = Grant(
    epoch=7,
    mode=GrantMode.OPEN,
    reason="idle",
    step_tokens_cap=256,
    kv_budget_tokens=4096,
    pulses=("pulse.prod.0",),
    ttft_slo_s=0.5,
    itl_slo_s=0.05,
    phantom_prompt_tokens=128,
    production=ProductionModel(
        prefill_base_s=0.5,
        prefill_s_per_token=0.25,
        decode_base_s=0.125,
        decode_s_per_request=0.0625,
    ),
    blocking_ratio=0.25,
)
GUEST = Guest(
    epoch=7, gate="open", steps_launched=3, steps_finished=2, tokens_total=24, weight_version="5"
)
PULSE = Pulse(
    in_flight=2,
    waiting=1,
    oldest_waiting_arrival_ns=999_000_000_000,
    largest_waiting_prompt_tokens=64,
    ttft_s_recent=(0.5,),
    samples_total=1,
)

# fmt: off
GOLDEN: list[tuple[Record, str]] = [
    (GRANT,
     ("524d58500100020002000000010000000010a5d4e8000000007572f2e80000004f010000bac2f98c8da56570"
      "6f636807a46d6f6465a46f70656ea6726561736f6ea469646c65af737465705f746f6b656e735f636170cd01"
      "00b06b765f6275646765745f746f6b656e73cd1000a670756c73657391ac70756c73652e70726f642e30aa74"
      "7466745f736c6f5f73cb3fe0000000000000a969746c5f736c6f5f73cb3fa999999999999aa7657073696c6f"
      "6ecb3fa999999999999ab57068616e746f6d5f70726f6d70745f746f6b656e73cc80aa70726f64756374696f"
      "6e84ae70726566696c6c5f626173655f73cb3fe0000000000000b370726566696c6c5f735f7065725f746f6b"
      "656ecb3fd0000000000000ad6465636f64655f626173655f73cb3fc0000000000000b46465636f64655f735f"
      "7065725f72657175657374cb3fb0000000000000ae626c6f636b696e675f726174696fcb3fd0000000000000"
      "ad61626f72745f67726163655f73cb4024")),
    (GUEST,
     ("524d58500100030002000000010000000010a5d4e8000000007572f2e8000000f8000000b2a59a1ede0011a5"
      "65706f636807a467617465a46f70656ea6726561736f6ea0ae73746570735f6c61756e6368656403ae737465"
      "70735f66696e697368656402ac746f6b656e735f746f74616c18b06c6173745f737465705f746f6b656e7300"
      "ab6c6173745f737465705f73cb0000000000000000b06c6173745f737465705f656e645f6e7300a772756e6e"
      "696e6700a777616974696e6700a96b765f746f6b656e7300af6b765f746f6b656e735f746f74616c00ae7765"
      "696768745f76657273696f6ea135ad61626f727465645f746f74616c00ae636c6f73696e67735f746f74616c"
      "00ad6465636964655f735f6d65616ecb")),
    (PULSE,
     ("524d58500100010002000000010000000010a5d4e8000000007572f2e8000000e70100001a9f51fdde0015a9"
      "696e5f666c6967687402a777616974696e6701a772756e6e696e6700a86465636f64696e6700b96f6c646573"
      "745f77616974696e675f6172726976616c5f6e73cf000000e8990a4600bd6c6172676573745f77616974696e"
      "675f70726f6d70745f746f6b656e7340b06c6173745f737465705f656e645f6e7300ab73746570735f746f74"
      "616c00ac627573795f735f746f74616ccb0000000000000000ab737465705f735f6d65616ecb000000000000"
      "0000b370726f6d70745f746f6b656e735f746f74616c00b767656e65726174696f6e5f746f6b656e735f746f"
      "74616c00ae72657175657374735f746f74616c00ae6b765f75736167655f726174696fcb0000000000000000"
      "b170726f6d70745f746f6b656e735f70393900ad747466745f735f726563656e7491cb3fe0000000000000ac"
      "69746c5f735f726563656e7490ad73616d706c65735f746f74616c01b169746c5f73616d706c65735f746f74"
      "616c00a56d6f64656c84ae70726566696c6c5f626173655f73cb0000000000000000b370726566696c6c5f73"
      "5f7065725f746f6b656ecb0000000000000000ad6465636f64655f626173655f73cb0000000000000000b464"
      "65636f64655f735f7065725f72657175657374cb0000000000000000ad6d6f64656c5f73616d706c6573")),
]
# fmt: on


def first_page(record: Record, path: Path) -> bytes:
    writer = PageWriter(path, type(record))
    writer.write(record, now_ns=NOW_NS, ttl_ns=TTL_NS)
    return path.read_bytes()


@pytest.mark.parametrize(("record", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_writes_the_agreed_bytes(record: Record, golden: str, tmp_path: Path) -> None:
    page = first_page(record, tmp_path / "page")
    assert len(page) == PAGE_BYTES
    assert page.rstrip(b"\0").hex() == golden


@pytest.mark.parametrize(("record", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_reads_the_agreed_bytes(record: Record, golden: str, tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(bytes.fromhex(golden).ljust(PAGE_BYTES, b"\0"))
    assert PageReader(path, type(record)).read(now_ns=NOW_NS).record == record
