"""Bearer tokens of RoseMux services: reads token files, sends tokens and checks requests."""

import hmac
import stat
from ipaddress import ip_address
from pathlib import Path

from harvester.contracts.errors import ConfigError

MIN_TOKEN_BYTES = 16
_MAX_TOKEN_BYTES = 4096


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; elsewhere a token is required."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: Path) -> bytes:
    """Raises ConfigError where the token is missing, short, no line or open to other users."""
    try:
        if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ConfigError(f"token file {path} is open to every user: chmod 600 {path}")
        with path.open("rb") as file:
            token = file.read(_MAX_TOKEN_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"cannot read token file {path}: {error.strerror}") from error
    if len(token) < MIN_TOKEN_BYTES or not token.isascii() or b"\n" in token:
        raise ConfigError(
            f"token file {path}: one line of at least {MIN_TOKEN_BYTES} ASCII characters"
        )
    return token


def read_own_token(path: Path, *, what: str = "token file") -> str:
    """A client's token, which its server judges. Raises ConfigError if the file is unreadable."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", error)
        raise ConfigError(f"cannot read {what} {path}: {why}") from error


def authorization(token: str) -> dict[str, str]:
    """Header that sends the token; none for an empty one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def is_sent(token: bytes, authorization: str) -> bool:
    """Whether an Authorization header carries the token; a wrong one takes no less time."""
    return hmac.compare_digest(authorization.encode(errors="replace"), b"Bearer " + token)
