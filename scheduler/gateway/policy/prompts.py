"""Prompts of a job's open turns, and what takes a pass over all of their ids.

A million ids take 40 ms to look through and 20 ms to encode. All samples of a request hold the same
ids, so each pass is made once for as long as one of its turns is open.
"""

from functools import cached_property
from weakref import WeakValueDictionary

import msgspec

from harvester.contracts.ids import JobId


class Prompt:
    def __init__(self, job: JobId, token_ids: tuple[int, ...]) -> None:
        self._job = job
        self.token_ids = token_ids

    @cached_property
    def name(self) -> str:
        """Names it where deaths of engines are charged to requests of the same content."""
        return f"{self._job}:{len(self.token_ids)}:{hash(self.token_ids)}"

    @cached_property
    def largest_id(self) -> int:
        return max(self.token_ids, default=0)

    @cached_property
    def encoded(self) -> msgspec.Raw:
        """The ids as JSON."""
        return msgspec.Raw(msgspec.json.encode(self.token_ids))


class Prompts:
    """Finds the prompt of a turn that is held by another one, by the ids' identity: to compare two
    would be a pass over both."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[int, Prompt] = WeakValueDictionary()

    def of(self, job: JobId, token_ids: tuple[int, ...]) -> Prompt:
        prompt = self._held.get(id(token_ids))
        if prompt is None:
            # It holds the ids, so that no others have their identity while it is found here.
            prompt = self._held[id(token_ids)] = Prompt(job, token_ids)
        return prompt
