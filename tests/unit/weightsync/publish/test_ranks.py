"""Ranks talk through files: all get the same messages; silent, late or failing ranks are named."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from harvester.contracts.errors import ConfigError, Corrupt, Exhausted, PeerProtocolError, Stale
from tests.virtual_clock import VirtualClock
from weightsync.publish.ranks import RANKS_DIRECTORY, RanksByFiles, SingleRank


class Said(msgspec.Struct, frozen=True):
    what: str


def _ranks(store: Path, count: int) -> list[RanksByFiles]:
    return [RanksByFiles(store, rank=r, ranks=count, timeout_s=30.0) for r in range(count)]


def _alone_at(store: Path, rank: int, *, ranks: int = 2) -> RanksByFiles:
    """Its waiting takes no time."""
    clock = VirtualClock()
    return RanksByFiles(
        store,
        rank=rank,
        ranks=ranks,
        timeout_s=5.0,
        clock=clock,
        pause=lambda seconds: clock.advance_to(clock.now() + max(seconds, 0.5)),
    )


def _talk(ranks: RanksByFiles, step: int, *, fails_at: int | None = None) -> list[str]:
    heard = []
    with ranks.exchange(step) as talk:
        for turn in range(3):
            if turn == fails_at:
                raise Exhausted("disk full")
            words = talk.gather(Said(f"{ranks.rank} says {turn}"))
            told = Said(", ".join(word.what for word in words)) if words else None
            heard.append(talk.tell(told, Said).what)
    return heard


def test_every_rank_gets_the_messages_of_all(tmp_path: Path) -> None:
    ranks = _ranks(tmp_path, 3)
    with ThreadPoolExecutor(3) as pool:
        for step in (1, 2, 7):
            told = list(pool.map(lambda each, step=step: _talk(each, step), ranks))
            expected = [f"0 says {turn}, 1 says {turn}, 2 says {turn}" for turn in range(3)]
            assert told == [expected] * 3
    left = {path.name for path in (tmp_path / RANKS_DIRECTORY).iterdir()}
    assert left == {"rank00001.lock", "rank00002.lock"}, "words that were heard are gone"


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_every_rank_raises_an_error_of_one_rank(tmp_path: Path, failing: int, turn: int) -> None:
    ranks = _ranks(tmp_path, 3)
    with ThreadPoolExecutor(3) as pool:
        talks = [
            pool.submit(_talk, each, 1, fails_at=turn if each.rank == failing else None)
            for each in ranks
        ]
        for talk in talks:
            with pytest.raises(Exhausted, match="disk full"):
                talk.result()
        for step in (1, 2):
            again = list(pool.map(lambda each, step=step: _talk(each, step), ranks))
            assert again[0] == again[1] == again[2], "the next conversation is whole"


def test_an_error_that_rank_0_never_took_is_no_part_of_the_retry(tmp_path: Path) -> None:
    first, other = _alone_at(tmp_path, 0), _alone_at(tmp_path, 1)
    with pytest.raises(Exhausted, match="disk full"):
        _talk(other, 1, fails_at=0)
    with other.exchange(1), pytest.raises(Exhausted, match="rank 1 of 2 did not report"):
        _talk(first, 1)


def test_silent_ranks_are_named(tmp_path: Path) -> None:
    first = _alone_at(tmp_path, 0, ranks=3)
    with (
        pytest.raises(Exhausted, match=r"step 4: rank 1, 2 of 3 did not report for 5 s"),
        first.exchange(4) as talk,
    ):
        talk.gather(Said("offer"))


def test_a_silent_rank_0_is_named(tmp_path: Path) -> None:
    other = _alone_at(tmp_path, 1)
    with pytest.raises(
        Exhausted, match="rank 0, which writes the manifest, did not report for 10 s"
    ):
        _talk(other, 1)


def test_a_rank_that_is_a_step_behind_is_refused_and_its_word_is_not_used(tmp_path: Path) -> None:
    first, other = _ranks(tmp_path, 2)
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(_talk, other, 10)
        begun = pool.submit(_talk, first, 11)
        with pytest.raises(Stale, match="rank 1 is at step 10, the others are at step 11"):
            late.result()
        assert _talk(other, 11)[0] == begun.result()[0] == "0 says 0, 1 says 0"


def test_a_rank_0_that_is_a_step_behind_says_so(tmp_path: Path) -> None:
    first, other = _ranks(tmp_path, 2)
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(_talk, other, 11)
        with pytest.raises(Stale, match="rank 1 is at step 11, rank 0 at step 10"):
            _talk(first, 10)
        _talk(first, 11)
        assert len(ahead.result()) == 3


def test_a_rank_0_that_starts_last_is_called_again(tmp_path: Path) -> None:
    other = RanksByFiles(tmp_path, rank=1, ranks=2, timeout_s=30.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_talk, other, 1)
        assert len(_talk(RanksByFiles(tmp_path, rank=0, ranks=2, timeout_s=30.0), 1)) == 3
        assert len(waiting.result()) == 3


def test_a_foreign_message_is_a_protocol_error(tmp_path: Path) -> None:
    first = _alone_at(tmp_path, 0)
    (tmp_path / RANKS_DIRECTORY / "call-00001").write_bytes(b"{torn")
    with pytest.raises(PeerProtocolError, match="call-00001"), first.exchange(1) as talk:
        talk.gather(Said("offer"))


def test_a_call_that_is_no_number_becomes_no_path(tmp_path: Path) -> None:
    first = _alone_at(tmp_path, 0)
    call = b'{"call": "/../../elsewhere", "step": 1}'
    (tmp_path / RANKS_DIRECTORY / "call-00001").write_bytes(call)
    with pytest.raises(PeerProtocolError, match="is no number"), first.exchange(1) as talk:
        talk.gather(Said("offer"))


def test_a_message_that_is_a_pipe_keeps_no_rank_waiting(tmp_path: Path) -> None:
    first = _alone_at(tmp_path, 0)
    os.mkfifo(tmp_path / RANKS_DIRECTORY / "call-00001")
    with pytest.raises(Corrupt, match="no plain file"), first.exchange(1) as talk:
        talk.gather(Said("offer"))


def test_a_rank_of_another_trainer_that_still_lives_keeps_this_one_out(tmp_path: Path) -> None:
    old = RanksByFiles(tmp_path, rank=1, ranks=2, timeout_s=30.0)
    with pytest.raises(ConfigError, match="rank 1 of another trainer still publishes"):
        RanksByFiles(tmp_path, rank=1, ranks=2, timeout_s=30.0)
    # A new rank 0 clears messages, and no lock.
    RanksByFiles(tmp_path, rank=0, ranks=2, timeout_s=30.0)
    with pytest.raises(ConfigError):
        RanksByFiles(tmp_path, rank=1, ranks=2, timeout_s=30.0)
    old.close()
    RanksByFiles(tmp_path, rank=1, ranks=2, timeout_s=30.0).close()


def test_one_rank_alone_hears_itself() -> None:
    with SingleRank().exchange(1) as talk:
        words = talk.gather(Said("all of it"))
        assert talk.tell(words[0], Said) == Said("all of it")
