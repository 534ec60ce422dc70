"""Tinker's protobuf of a request's samples, read anew. Pure.

`SampleResponse` has its sequences in field 1; `SampledSequence` has the stop reason (0 a stop, 1
the length) in field 1, token ids as int32 in field 2 and log-probabilities as float32 in field 3.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TinkerSequence:
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


def sequences(reply: bytes) -> list[TinkerSequence]:
    """Raises ValueError for what is no such message."""
    return [_sequence(content) for field, content in _fields(reply) if field == 1]


def _sequence(message: bytes | int) -> TinkerSequence:
    if isinstance(message, int):
        raise ValueError("a sequence is a message")
    fields = dict(_fields(message))
    ids, logprobs = fields.get(2, b""), fields.get(3, b"")
    if isinstance(ids, int) or isinstance(logprobs, int):
        raise ValueError("token ids and log-probabilities are bytes")
    return TinkerSequence(
        token_ids=[each for (each,) in struct.iter_unpack("<i", ids)],
        logprobs=[each for (each,) in struct.iter_unpack("<f", logprobs)],
        finish_reason="length" if fields.get(1, 0) == 1 else "stop",
    )


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Each field's number and value: a number or bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value, at = _varint(message, at)
        if key & 7 == 0:
            yield key >> 3, value
        elif key & 7 == 2 and at + value <= len(message):
            yield key >> 3, message[at : at + value]
            at += value
        else:
            raise ValueError(f"field {key} at byte {at}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 0x80:
            return value, at
    raise ValueError("a number without its end")
