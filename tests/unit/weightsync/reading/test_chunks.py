"""Every requested byte is pulled once, for any readers and any ranges."""

from hypothesis import given
from hypothesis import strategies as st

from weightsync.reading.chunks import ChunkMap
from weightsync.transport.ranges import ByteSpan

CHUNK = 10


@st.composite
def spans(draw: st.DrawFn, size: int) -> ByteSpan:
    start = draw(st.integers(0, size - 1))
    return ByteSpan(start, draw(st.integers(start + 1, size)))


@given(st.integers(1, 300), st.integers(1, 50), st.data())
def test_readers_of_overlapping_ranges_share_one_pull(
    size: int, run_bytes: int, data: st.DataObject
) -> None:
    chunks = ChunkMap(size, chunk_bytes=CHUNK)
    asked: set[int] = set()
    pulled: list[int] = []
    flying: list[ByteSpan] = []
    for _ in range(data.draw(st.integers(1, 12))):
        span = data.draw(spans(size))
        chunks.want(span)
        asked.update(range(span.start, span.stop))
        for _ in range(data.draw(st.integers(0, 3))):
            run = chunks.claim(run_bytes)
            if run is not None:
                assert run.size_bytes <= max(run_bytes, CHUNK)
                flying.append(run)
                pulled.extend(range(run.start, run.stop))
        while flying and data.draw(st.booleans()):
            chunks.arrived(flying.pop())
    while (run := chunks.claim(run_bytes)) is not None:
        flying.append(run)
        pulled.extend(range(run.start, run.stop))
    for run in flying:
        chunks.arrived(run)
    assert len(pulled) == len(set(pulled)), "no byte twice"
    assert asked <= set(pulled)
    assert all(at // CHUNK in {each // CHUNK for each in asked} for at in pulled)
    for at in range(size):
        assert chunks.has(ByteSpan(at, at + 1)) == (at in set(pulled))
    assert chunks.is_whole == (len(pulled) == size)


def test_a_lost_run_is_pulled_again_only_on_request() -> None:
    chunks = ChunkMap(30, chunk_bytes=CHUNK)
    chunks.want(ByteSpan(0, 30))
    run = chunks.claim(20)
    assert run == ByteSpan(0, 20)
    chunks.lost(run)
    assert chunks.claim(20) == ByteSpan(20, 30)
    assert chunks.claim(20) is None
    chunks.want(ByteSpan(5, 6))
    assert chunks.claim(20) == ByteSpan(0, 10)


def test_an_unwanted_chunk_is_not_claimed() -> None:
    chunks = ChunkMap(100, chunk_bytes=CHUNK)
    assert chunks.claim(100) is None
    chunks.want(ByteSpan(95, 100))
    assert chunks.claim(100) == ByteSpan(90, 100)


def test_the_last_chunk_is_as_long_as_the_file() -> None:
    chunks = ChunkMap(25, chunk_bytes=CHUNK)
    chunks.want(ByteSpan(0, 25))
    run = chunks.claim(1000)
    assert run == ByteSpan(0, 25)
    chunks.arrived(run)
    assert chunks.is_whole


def test_a_forgotten_chunk_is_claimed_again() -> None:
    chunks = ChunkMap(30, chunk_bytes=10)
    chunks.want(ByteSpan(0, 20))
    run = chunks.claim(20)
    assert run == ByteSpan(0, 20)
    chunks.arrived(run)
    chunks.want(ByteSpan(20, 30))
    coming = chunks.claim(10)
    assert coming == ByteSpan(20, 30)
    chunks.forget()
    assert not chunks.has(ByteSpan(0, 10))
    chunks.arrived(coming)
    assert not chunks.is_whole
    chunks.want(ByteSpan(0, 20))
    again = chunks.claim(20)
    assert again == ByteSpan(0, 20)
    chunks.arrived(again)
    assert chunks.is_whole
