from pathlib import Path

import pytest
from tokenizers import Tokenizer

from examples.grpo.vocabulary import (
    VOCABULARY_SIZE,
    WORDS,
    decoded,
    digit_of,
    digits_encoded,
    encoded,
    write_tokenizer,
)


def test_ids_never_change_because_checkpoints_depend_on_them() -> None:
    text = "<pad> <bos> ; 0 9 hops start turn left key do call answer is"
    assert encoded(text) == (0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21)


def test_every_word_has_one_id_and_comes_back() -> None:
    assert len(set(WORDS)) == VOCABULARY_SIZE <= 512
    assert encoded(decoded(range(VOCABULARY_SIZE))) == tuple(range(VOCABULARY_SIZE))


def test_digits_are_digits_and_nothing_else_is() -> None:
    assert [digit_of(token_id) for token_id in digits_encoded((0, 4, 9))] == [0, 4, 9]
    assert sum(digit_of(token_id) is not None for token_id in range(-5, VOCABULARY_SIZE)) == 10


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(KeyError):
        encoded("turn left nowhere")


def test_the_tokenizer_file_splits_text_into_the_same_ids(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<bos> hops 3 start 1 2 3 ;"
    assert tuple(loaded.encode(text).ids) == encoded(text)
    assert loaded.get_vocab_size() == VOCABULARY_SIZE
