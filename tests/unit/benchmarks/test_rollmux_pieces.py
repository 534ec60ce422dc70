"""The RollMux benchmark's pieces: the same in several processes, and kept between runs."""

from pathlib import Path

from benchmarks.rollmux.pieces import ArmOfSeed, Pieces

WANTED = [ArmOfSeed(name=name, seed=3, jobs=3) for name in ("ours", "greedy")]


def test_arms_that_ran_side_by_side_found_what_they_find_one_after_another(tmp_path: Path) -> None:
    together, alone = Pieces(tmp_path, workers=2), Pieces(None)
    together.run_ahead(WANTED)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "greedy-3-none-0-of-3.json",
        "ours-3-none-0-of-3.json",
    ]
    assert [together.arm(one).arm for one in WANTED] == [alone.arm(one).arm for one in WANTED]


def test_what_is_kept_is_not_run_again(tmp_path: Path) -> None:
    first = Pieces(tmp_path).arm(WANTED[1])
    again = Pieces(tmp_path, workers=2)
    again.run_ahead(WANTED[1:])
    assert again.arm(WANTED[1]) == first
