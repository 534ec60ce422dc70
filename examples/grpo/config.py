"""Start configuration of a trainer process: one JSON file, checked before anything runs."""

from pathlib import Path

import msgspec

from examples.grpo.grpo import GrpoSettings
from examples.grpo.master_weights import AdamSettings
from examples.grpo.warm_up import WarmUp
from harvester.contracts.errors import ConfigError, PeerProtocolError
from harvester.contracts.ids import checked_name

_FILE_MAX_BYTES = 1 << 20


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: str
    """Name at the gateway; at most 40 characters, it begins every trajectory's name."""
    gateway_url: str
    weight_root: Path
    """Directory of all stores; this job's is `weight_root / store`."""
    store: str
    cache_dir: Path
    """Directory of warm policies, kept between runs."""
    seed: int = 1
    """Seed of tasks and sampling; the warm policy has its own."""
    samples_per_prompt: int = 8
    warm_up: WarmUp = msgspec.field(default_factory=WarmUp)
    """Its `tasks` are also the distribution that the job trains on."""
    adam: AdamSettings = msgspec.field(default_factory=AdamSettings)
    grpo: GrpoSettings = msgspec.field(default_factory=GrpoSettings)


def read_config(path: Path) -> JobConfig:
    """Reads the file. Raises ConfigError that names the fault and its field."""
    try:
        if path.stat().st_size > _FILE_MAX_BYTES:
            raise ConfigError(f"{path}: larger than {_FILE_MAX_BYTES} bytes")
        raw = msgspec.json.decode(path.read_bytes())
        config = msgspec.convert(raw, JobConfig, dec_hook=_decoded)
        _reject_unknown(raw, msgspec.to_builtins(config, enc_hook=str), at="")
        checked_name(config.job, what="job")
        checked_name(config.store, what="store")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, PeerProtocolError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if len(config.job) > 40:
        raise ConfigError(f"{path}: job: use at most 40 characters")
    if config.samples_per_prompt < 2:
        raise ConfigError(f"{path}: samples_per_prompt: a group needs at least 2 samples")
    return config


def _decoded(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} from {type(value).__name__}")


def _reject_unknown(raw: object, known: object, *, at: str) -> None:
    if not isinstance(raw, dict) or not isinstance(known, dict):
        return
    for name, value in raw.items():
        if name not in known:
            raise ConfigError(f"{at}{name}: there is no such setting")
        _reject_unknown(value, known[name], at=f"{at}{name}.")
