"""One part of a model's state: real objects with a clock of their own, each form of them kept once.

A state of the model names its parts by number, so it is small, hashable and cheap to compare. A
part's call is made once for each form and arguments, on a copy; policies are pure, so the answer is
the same ever after. Two parts are one if they differ in nothing but the hour: times are compared by
their distance from the part's own clock, as no protocol compares clocks of two processes.
"""

import copy
from collections import deque
from collections.abc import Callable, Hashable, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import xxhash


class Clocked(Protocol):
    @property
    def now(self) -> float: ...


T = TypeVar("T", bound=Clocked)
_PLAIN = frozenset({str, int, bool, bytes, type(None)})


class Part(Generic[T]):
    def __init__(
        self,
        *,
        moments: Set[str],
        ignored: Set[str] = frozenset(),
        age_max_s: float,
        pack: Callable[[T], Any] = lambda thing: thing,
        unpack: Callable[[Any], T] = copy.deepcopy,
    ) -> None:
        """`moments` are fields that hold times; `ignored` ones that no call depends on: settings,
        counters for people. A time further away than `age_max_s` is as good as any other. Parts of
        many forms are kept packed; `unpack` makes a new one. A class's `FORM` names what
        makes up its form."""
        self._moments, self._ignored, self._age_max_s = moments, ignored, age_max_s
        self._pack, self._unpack = pack, unpack
        self._things: list[Any] = []
        self._numbers: dict[bytes, int] = {}
        self._calls: dict[Hashable, tuple[int, Any]] = {}
        self._names: dict[type, list[str]] = {}

    def __len__(self) -> int:
        return len(self._things)

    def add(self, thing: T) -> int:
        form = xxhash.xxh3_128_digest(repr(self._form(thing, "", thing.now)).encode())
        number = self._numbers.setdefault(form, len(self._things))
        if number == len(self._things):
            self._things.append(self._pack(thing))
        return number

    def look(self, number: int) -> T:
        """To read, not to change. Only of parts that are not packed."""
        found: T = self._things[number]
        return found

    def call(self, number: int, method: str, *arguments: Hashable) -> tuple[int, Any]:
        """The part after the call, and its answer. Raises as the method does."""
        key = (number, method, arguments)
        known = self._calls.get(key)
        if known is None:
            thing = self._unpack(self._things[number])
            answer = getattr(thing, method)(*arguments)
            known = self._calls[key] = (self.add(thing), answer)
        return known

    def ask(self, number: int, method: str, *arguments: Hashable) -> Any:
        """The answer of a call that changes nothing."""
        after, answer = self.call(number, method, *arguments)
        assert after == number, f"{method} changes what it was asked of"
        return answer

    def _form(self, thing: Any, name: str, now: float) -> Hashable:
        kind = type(thing)
        if kind is float:
            if name in self._moments:
                return max(-self._age_max_s, min(self._age_max_s, thing - now))
            return float(thing)
        if kind in _PLAIN or isinstance(thing, Enum):
            return str(thing) if isinstance(thing, str) else int(thing) if kind is int else thing
        if isinstance(thing, dict):
            return tuple([(key, self._form(each, name, now)) for key, each in thing.items()])
        if isinstance(thing, tuple | list | deque):
            return tuple([self._form(each, name, now) for each in thing])
        if isinstance(thing, set | frozenset):
            return tuple(sorted(self._form(each, name, now) for each in thing))  # type: ignore[type-var]
        names = self._names.get(kind)
        if names is None:
            names = self._names[kind] = self._names_of(thing)
        values = [self._form(getattr(thing, each), each, now) for each in names]
        return kind.__name__, tuple(values)

    def _names_of(self, thing: Any) -> list[str]:
        names: Any = getattr(thing, "FORM", None)
        if names is not None:
            return list(names)
        if isinstance(thing, msgspec.Struct):
            names = thing.__struct_fields__
        elif is_dataclass(thing):
            names = [each.name for each in fields(thing)]
        else:
            names = [name for name in vars(thing) if name != "now"]
        return [name for name in names if name not in self._ignored]
