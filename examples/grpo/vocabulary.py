"""The policy's word-level vocabulary, and the tokenizer file that an engine needs to load it.

Decides which word has which id. The ids never change meaning: checkpoints and caches depend on
them. The job itself speaks ids only; words are for people, logs and the engines' start-up.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

VOCABULARY_SIZE = 64
"""Padded to a multiple of 64, which is what the engines' and the CPU's matrix tiles want."""

_WORDS = (
    *("<pad>", "<bos>", ";"),
    *(str(digit) for digit in range(10)),
    *("hops", "start", "turn", "left", "key", "do", "call", "answer", "is"),
)
WORDS = _WORDS + tuple(f"<unused-{i}>" for i in range(len(_WORDS), VOCABULARY_SIZE))
_ID_OF = {word: token_id for token_id, word in enumerate(WORDS)}

PAD_ID = _ID_OF["<pad>"]
BOS_ID = _ID_OF["<bos>"]
STOP_ID = _ID_OF[";"]
"""Ends every line, the policy's and the tool's."""
FIRST_DIGIT_ID = _ID_OF["0"]
CALL_ID = _ID_OF["call"]
ANSWER_ID = _ID_OF["answer"]


def encoded(text: str) -> tuple[int, ...]:
    """Ids of whitespace-separated words. Raises KeyError for a word that is not in WORDS."""
    return tuple(_ID_OF[word] for word in text.split())


def decoded(token_ids: Iterable[int]) -> str:
    """The words of `token_ids`; an id out of range shows as <?>."""
    return " ".join(WORDS[i] if 0 <= i < VOCABULARY_SIZE else "<?>" for i in token_ids)


def digits_encoded(digits: Sequence[int]) -> tuple[int, ...]:
    return tuple(FIRST_DIGIT_ID + digit for digit in digits)


def digit_of(token_id: int) -> int | None:
    """0 to 9, or None where `token_id` is no digit."""
    digit = token_id - FIRST_DIGIT_ID
    return digit if 0 <= digit <= 9 else None


def write_tokenizer(directory: Path, *, words: int = VOCABULARY_SIZE) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` as Hugging Face's fast tokenizers read
    them: words split at whitespace, one id each.

    `words` is the model's vocabulary, so that every id that it samples has a word; those beyond
    WORDS mean nothing.
    """
    ids = _ID_OF | {f"<unused-{i}>": i for i in range(VOCABULARY_SIZE, words)}
    special = [
        {
            "id": token_id,
            "content": WORDS[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id in (PAD_ID, BOS_ID)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": WORDS[PAD_ID]},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": WORDS[BOS_ID],
        "eos_token": WORDS[STOP_ID],
        "pad_token": WORDS[PAD_ID],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
