"""Messages between the harness and the fork server: a task in, its end out."""

import msgspec

from weightsync.encoding.codec import Encoding


class ChildDeath(msgspec.Struct, frozen=True, kw_only=True):
    """The moment of a child's death; without any of these it lives and reports its progress."""

    after_bytes: int | None = None
    """Bytes that it writes before."""
    after_calls: int | None = None
    """System calls with a file name before."""
    after_s: float | None = None
    """Seconds from the beginning of its phase."""
    in_tensor: int | None = None
    """While this tensor (by order of writing) is written: the last part of it is still old."""
    written_ratio: float = 0.5


class ChildTask(msgspec.Struct, frozen=True, kw_only=True):
    """A child's work."""

    role: str
    store: str
    seed: int = 0
    target: str = ""
    """The checkpoint directory of a pull, the mirror of a copy, the file that ends a server."""
    port: int = 0
    cache: str = ""
    """A relay's directory."""
    state_indices: tuple[int, ...] = ()
    encoding: Encoding = Encoding.ROSEMUX
    anchor_every: int = 25
    shard_bytes: int = 32 << 20
    keep_versions: int = 50
    copy_dir: str = ""
    """Directory of a publisher's copy that outlives it."""
    phase: str = "run"
    """Phase from which `after_s` counts: run, stage or apply."""
    death: ChildDeath = ChildDeath()


class ChildEnd(msgspec.Struct, frozen=True, kw_only=True):
    """End of a child, and its progress if it lived."""

    killed: bool
    status: int
    bytes: int = 0
    calls: int = 0
    seconds: float = 0.0
    tensors: int = 0
