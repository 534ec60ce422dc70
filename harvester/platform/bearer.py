"""Bearer tokens of RoseMux services: reads token files, sends tokens and checks requests."""

import hmac
import stat
from ipaddress import ip_address
from pathlib import Path

from harvester.contracts.errors import ConfigError, config_error_of
from harvester.platform.renewed import Renewed

MIN_TOKEN_BYTES = 16
_MAX_TOKEN_BYTES = 4096


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; elsewhere a token is required."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_token_file(path: Path, *, open_to: int = stat.S_IROTH | stat.S_IWOTH) -> None:
    """Raises NotYet for an absent file, ConfigError for one whose mode has a bit of `open_to`."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise config_error_of(error)(f"cannot read token file {path}: {error.strerror}") from error
    if mode & open_to:
        raise ConfigError(f"token file {path} is open to other users: chmod 600 {path}")


def read_tokens(path: Path) -> tuple[bytes, ...]:
    """Tokens of a file, one a line: a server accepts each, so that its clients can change over.

    Raises ConfigError where one is short or no ASCII, or the file is open to other users.
    """
    check_token_file(path)
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_TOKEN_BYTES).splitlines()
    except OSError as error:
        raise config_error_of(error)(f"cannot read token file {path}: {error.strerror}") from error
    tokens = tuple(filter(None, map(bytes.strip, lines)))
    if not tokens or any(len(t) < MIN_TOKEN_BYTES or not t.isascii() for t in tokens):
        raise ConfigError(
            f"token file {path}: give lines of at least {MIN_TOKEN_BYTES} ASCII characters"
        )
    return tokens


def read_token(path: Path) -> bytes:
    """A client's token: the only one of its file. Raises ConfigError as above."""
    token, *others = read_tokens(path)
    if others:
        raise ConfigError(f"token file {path}: a client's has one line, the token that it sends")
    return token


class TokenFile:
    """Tokens that a server accepts, read from their file as it is now. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tokens = Renewed([path], lambda: read_tokens(path))

    def accepts(self, authorization: str) -> bool:
        """Whether an Authorization header carries one of them; all are compared."""
        return self.line_of(authorization) > 0

    def line_of(self, authorization: str) -> int:
        """Number of the token that an Authorization header carries, from 1; 0 for none."""
        lines = enumerate(self._tokens.current(), start=1)
        return max((number for number, token in lines if is_sent(token, authorization)), default=0)


def authorization(token: str) -> dict[str, str]:
    """Header that sends the token; none for an empty one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def is_sent(token: bytes, authorization: str) -> bool:
    """Whether an Authorization header carries the token; a wrong one takes no less time."""
    return hmac.compare_digest(authorization.encode(errors="replace"), b"Bearer " + token)
