"""The layout of a store, recognised from what a tenant wrote."""

import tracemalloc
from pathlib import Path

from weightsync.layout.names import INDEX_FILE, MAX_INDEX_BYTES
from weightsync.layout.tables import packed_table
from weightsync.transport.location import StoreRoot


def test_listing_a_store_takes_no_more_memory_than_its_index_has_bytes(tmp_path: Path) -> None:
    """An index of 512 MiB has 6 KB when it is compressed, and became 14 GiB of lists."""
    (tmp_path / "job-a" / "weight_v000001").mkdir(parents=True)
    index = tmp_path / "job-a" / "weight_v000001" / INDEX_FILE
    content = f'{{"metadata": {{"version": 1}}, "weight_map": {{}}, "x": [{"[]," * 1_000_000}[]]}}'
    for raw in (content.encode(), packed_table(content.encode())):
        index.write_bytes(raw)
        tracemalloc.start()
        try:
            StoreRoot(tmp_path).store("job-a").directories()
            # A read makes room for the largest index.
            assert tracemalloc.get_traced_memory()[1] < MAX_INDEX_BYTES + 2 * len(content)
        finally:
            tracemalloc.stop()
