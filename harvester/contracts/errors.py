"""The one tree of errors that cross a package boundary.

    RoseMuxError
    ├── ConfigError          the user must fix it; stop at start
    │   └── NotYet           unless the machine is still starting; a supervisor tries again
    ├── Exhausted            there is none left now; try later
    ├── Stale                an old epoch or version; drop it
    ├── PeerProtocolError    the other side broke the protocol
    ├── Corrupt              stored or received bytes are not what was written
    └── Unsupported          this machine, engine or version cannot do it

Refusals that a policy expects are values with a reason, not exceptions. Catch where you can act.
"""

import errno
from contextlib import suppress

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All exceptions of msgspec for foreign bytes: it passes invalid UTF-8 and unbounded nesting
through as Python's own errors."""


def reason_of(error: BaseException) -> str:
    """An error's message, or its class where it has none: a timeout says nothing."""
    return str(error) or type(error).__name__


def message_of(content: bytes) -> str:
    """The message of an error, as `{"error": MESSAGE}`, as vLLM's objects, or as any other text."""
    with suppress(*UNDECODABLE):
        found = msgspec.json.decode(content)
        while isinstance(found, dict):
            found = found.get("error") or found.get("message")
        if found and isinstance(found, str):
            return found
    return content.decode(errors="replace")


class RoseMuxError(Exception):
    """Root of every error that RoseMux raises on purpose."""


class ConfigError(RoseMuxError):
    """Wrong settings or a missing prerequisite; the message says what to do."""


class NotYet(ConfigError):  # noqa: N818 - named for the state, not for a fault
    """An address, a user or a file that the settings name is not here, or is another process's,
    which may hang in the kernel after it was killed: it may come."""


def config_error_of(error: Exception) -> type[ConfigError]:
    """Error class for a failed system call: NotYet if its file or address is absent or taken."""
    waits_for = (errno.ENOENT, errno.EADDRNOTAVAIL, errno.EADDRINUSE)
    return NotYet if getattr(error, "errno", None) in waits_for else ConfigError


class Exhausted(RoseMuxError):  # noqa: N818
    """A resource is used up for now; the same call may succeed later."""


class Stale(RoseMuxError):  # noqa: N818
    """An epoch or weight version is older than the one in force; drop the message."""


class PeerProtocolError(RoseMuxError):
    """A peer sent something that its protocol does not allow."""


class Corrupt(RoseMuxError):  # noqa: N818
    """Bytes at rest or on the wire do not match their checksum, length or format."""


class Unsupported(RoseMuxError):  # noqa: N818
    """This machine, engine or version cannot do the requested work."""
