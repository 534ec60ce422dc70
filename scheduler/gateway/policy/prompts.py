"""Prompts of a job's turns, and what takes a pass over all of their ids.

A million ids take 40 ms to look through and 20 ms to encode. All samples of a request hold the same
ids, so each pass is made once for as long as one of its turns is open or kept.
"""

import msgspec

from harvester.contracts.ids import JobId

_ENCODER = msgspec.json.Encoder()


class Prompt:
    """`name` names it where deaths of engines are charged to requests of the same content."""

    def __init__(self, job: JobId, token_ids: tuple[int, ...]) -> None:
        self.token_ids = token_ids
        self.name = f"{job}:{len(token_ids)}:{hash(token_ids)}"
        self.largest_id = max(token_ids, default=0)
        self._encoded: msgspec.Raw | None = None

    @property
    def encoded(self) -> msgspec.Raw:
        """The ids as JSON. No cached_property: in Python 3.11 that takes a lock."""
        if self._encoded is None:
            self._encoded = msgspec.Raw(_ENCODER.encode(self.token_ids))
        return self._encoded
