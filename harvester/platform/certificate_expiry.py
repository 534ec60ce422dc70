"""When the certificates that this process has in use expire, as a log line and as a gauge.

Counts the newest load of each file: a listening context keeps the certificate that it has read
first, and hands connections over to a newer one. `ssl` shows the dates of verified peers and of
authorities alone, so they are read here (RFC 5280, sections 4.1 and 4.1.2.5).
"""

import logging
import math
import re
import ssl
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from harvester.contracts.clock import wall_seconds

if TYPE_CHECKING:
    from prometheus_client import Gauge

NAME: Final = "certificate_expiry_timestamp_seconds"
HELP: Final = (
    "When a certificate in use (the first of its chain to end) expires, in seconds since 1970."
)
LABELS: Final = ("file",)
_WARNING_S = 14 * 86400.0
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17
_VALIDITY = 3
"""Place of the dates among the fields behind the version."""

_log = logging.getLogger(__name__)
_loaded: Final[WeakKeyDictionary[ssl.SSLContext, tuple[str, float]]] = WeakKeyDictionary()
_lock = threading.Lock()


def note_expiry(context: ssl.SSLContext, chain: Path) -> None:
    """Count the certificates of a file for as long as `context` lives, and warn of their end.
    Raises OSError."""
    try:
        ends_s = chain_expiry_s(chain.read_text(errors="replace"))
    except ValueError as error:
        # OpenSSL has taken it: a service does not stop for the dates.
        _log.warning("certificate %s: its end cannot be read: %s", chain, error)
        ends_s = math.nan
    known = _expiries().get(str(chain))
    with _lock:
        _loaded[context] = str(chain), ends_s
    left_s = ends_s - wall_seconds()
    if ends_s != known and left_s < _WARNING_S:
        ends = datetime.fromtimestamp(ends_s, UTC).isoformat(timespec="seconds")
        when = f"in {left_s / 86400:.1f} days" if left_s > 0 else "already"
        _log.warning("certificate %s expires %s, at %s", chain, when, ends)


def show_expiries(gauge: "Gauge") -> None:
    """Replace the rows of a gauge whose one label is the file."""
    gauge.clear()
    for file, ends_s in _expiries().items():
        gauge.labels(file).set(ends_s)


def chain_expiry_s(chain: str) -> float:
    """Earliest expiry of a certificate in a PEM chain; NaN without one. Raises ValueError for a
    malformed certificate."""
    found = map(ssl.PEM_cert_to_DER_cert, _CERTIFICATE.findall(chain))
    return min(map(_expiry_s, found), default=math.nan)


def _expiries() -> dict[str, float]:
    with _lock:
        return dict(_loaded.values())


def _expiry_s(der: bytes) -> float:
    try:
        signed = _elements(_elements(_elements(der)[0][1])[0][1])
        fields = [content for tag, content in signed if tag != _VERSION]
        tag, at = _elements(fields[_VALIDITY])[1]
    except IndexError as error:
        raise ValueError("a certificate is cut") from error
    text = at.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Tags and contents of DER elements in a row."""
    found = []
    while der:
        size, begin = der[1], 2
        if size & 0x80:
            begin += size & 0x7F
            size = int.from_bytes(der[2:begin])
        found.append((der[0], der[begin : begin + size]))
        der = der[begin + size :]
    return found
