"""Production's KV connectors that may wait for KV of another machine.

A connector counts as local only if its class and each setting are known to keep KV on this host.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOCAL = ("OffloadingConnector", "SimpleCPUOffloadConnector", "HiSparseConnector")
"""vLLM's connectors that load KV from this host only."""
_SENDING_PREFIXES = ("Nixl", "Mooncake", "MoRIIO")
"""vLLM's connectors between two engines, whose producers load from no other; stores are none of
them (`MooncakeStoreConnector`)."""
_LOCAL_OFFLOADING = "CPUOffloadingSpec"
"""vLLM's default; tiers (`TieringOffloadingSpec`) may be object stores or other engines."""

_LMCACHE = "LMCacheConnectorV1"
_LMCACHE_LOCAL = frozenset(
    {
        *("chunk_size", "local_cpu", "max_local_cpu_size", "reserve_local_cpu_size"),
        *("local_disk", "max_local_disk_size", "local_disk_path_sharding"),
        *("local_cpu_use_hugepages", "numa_mode", "cache_policy", "pre_caching_hash_algorithm"),
        *("use_layerwise", "save_decode_cache", "save_unfull_chunk", "min_retrieve_tokens"),
        *("enable_async_loading", "lmcache_instance_id", "log_level", "use_experimental"),
        *("use_native", "discard_partial_chunks", "skip_last_n_tokens", "lmcache_rpc_port"),
    }
)
"""Settings of LMCache that name no other place: without any others its KV lies in this host's
memory and on its disks."""
_OFF = ("false", "0", "none", "null")
_FILE_BYTES_MAX = 64 << 10
"""A few KB hold every setting; a file without an end would hold production's start up."""


def remote_connectors(transfer: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and role of each connector that is not known to load KV from this host only; a
    MultiConnector's own are in its extra configuration."""
    name, role = transfer.get("kv_connector"), transfer.get("kv_role", "")
    extra = transfer.get("kv_connector_extra_config") or {}
    # A class of the operator's own may have the name of one of vLLM's.
    own_class = transfer.get("kv_connector_module_path")
    if name == "MultiConnector" and not own_class:
        for each in extra.get("connectors", ()):
            yield from remote_connectors({"kv_role": role, **each})
        return
    if name is None:
        return
    local = name in _LOCAL
    if name == "OffloadingConnector" and extra.get("spec_name", _LOCAL_OFFLOADING) != (
        _LOCAL_OFFLOADING
    ):
        name, local = f"{name} with {extra['spec_name']}", False
    if name == _LMCACHE:
        elsewhere = _lmcache_elsewhere(extra)
        name, local = f"{name} with {elsewhere}" if elsewhere else name, not elsewhere
    sends = name.startswith(_SENDING_PREFIXES) and "Store" not in name
    local = local or (role == "kv_producer" and sends)
    if role == "kv_consumer" or own_class or not local:
        yield name, role


def _lmcache_elsewhere(extra: Mapping[str, Any]) -> str:
    """The first setting of LMCache, from any of its sources, with which its KV may lie on another
    machine; "" if there is none."""
    settings = [(name.removeprefix("lmcache."), value) for name, value in extra.items()]
    environment = {name: value for name, value in os.environ.items() if name.startswith("LMCACHE_")}
    file = environment.pop("LMCACHE_CONFIG_FILE", None)
    settings += [(name[8:].lower(), value) for name, value in environment.items()]
    if file is not None:
        given = _settings_in(Path(file))
        if not isinstance(given, dict):
            return f"LMCACHE_CONFIG_FILE {file[:200]}, which cannot be read"
        settings += given.items()
    return next((str(name)[:80] for name, value in settings if not _is_local(name, value)), "")


def _settings_in(file: Path) -> Any:
    """The file's content; None where it is no plain file of YAML: a pipe would wait for its writer,
    and LMCache would no longer find what was read from it here."""
    with suppress(Exception):  # In production no error may surface; the reason is the name.
        import yaml

        status = file.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= _FILE_BYTES_MAX:
            return yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    return None


def _is_local(name: str, value: Any) -> bool:
    # The text of a value is not made: aliases in a file can make it grow without a bound.
    off = isinstance(value, str) and value.strip().lower() in _OFF
    return name in _LMCACHE_LOCAL or not value or off
