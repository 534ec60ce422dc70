"""Learns the EOS tokens of a job's model from the ends of its turns: no engine names them.

    known      once two engines, or `_TURNS` turns, ended with it without another reason

One false `stop` must not end turns of other engines. Holds no socket and reads no clock.
"""

from collections import defaultdict

from harvester.contracts.ids import EngineId

_TURNS = 4
_CANDIDATES = 64
"""Tokens in doubt that are remembered; a model has a few EOS tokens."""


class EndTokens:
    def __init__(self) -> None:
        self.known: set[int] = set()
        self._ended: defaultdict[int, list[EngineId]] = defaultdict(list)
        """Engines of the turns that ended with a token that is not known yet."""

    def note(self, token_id: int, engine: EngineId) -> None:
        """A turn ended with this token on the engine's word, and for no reason that it named."""
        if token_id in self.known:
            return
        ended = self._ended[token_id]
        ended.append(engine)
        if len(set(ended)) > 1 or len(ended) >= _TURNS:
            self.known.add(token_id)
            del self._ended[token_id]
        elif len(self._ended) > _CANDIDATES:
            del self._ended[next(iter(self._ended))]
