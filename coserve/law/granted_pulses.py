"""The pulse pages that a slot's grant names, as a guest's processes read them."""

import logging

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.page import Grant, PageDirectory, PageReader, PulseHead, Reading

_log = logging.getLogger(__name__)


class GrantedPulses:
    def __init__(self, directory: PageDirectory) -> None:
        self._directory = directory
        self._names: tuple[str, ...] = ()
        self._pages: dict[str, PageReader[PulseHead]] = {}

    @property
    def pages(self) -> tuple[PageReader[PulseHead], ...]:
        """Pages of the grant that was read for last."""
        return tuple(self._pages.values())

    def read(self, grant: Grant, *, now_ns: int) -> list[Reading[PulseHead]]:
        """One reading for each name; [] if the grant names no pulses of this directory: the gate
        then stays closed until a better grant."""
        if self._names != grant.pulses:
            for page in self._pages.values():
                page.close()
            self._names, self._pages = grant.pulses, {}
            try:
                names = grant.pulses
                self._pages = {name: self._directory.pulse_head_reader(name) for name in names}
            except PeerProtocolError as error:
                _log.error("grant of %s: %s", self._directory.path, error)
        return [page.read(now_ns=now_ns) for page in self._pages.values()]
