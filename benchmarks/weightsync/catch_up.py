"""Bytes that a receiver reads after an absence: `python -m benchmarks.weightsync.catch_up`.

Small models of four architectures take real steps of AdamW on 32-bit weights; the published values
are those rounded to bfloat16. Each state goes into a store with a publisher's defaults and into one
without skip deltas. Receivers that hold an older version, from each version that has one so many
versions later, and joiners catch up from both, and from `rosemux weights serve` over the first;
every byte that they read counts, indexes included, and what they end with is compared with the
published state.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.testbed.reporting import report
from benchmarks.weightsync.children import weight_server
from benchmarks.weightsync.counted import Counted, CountedDirectory, CountedHttp
from harvester.contracts.ids import WeightVersion
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

State = dict[str, torch.Tensor]
LEARNING_RATES = (1e-6, 3e-6)
"""As in fine-tuning by reinforcement: at 1e-6 one element in a hundred changes in a step."""
VERSIONS = 50
"""Two full checkpoints, beside 1 and 26, each with all versions before the next."""
ABSENCES = (4, 8, 16, 24)
_SETTLING_STEPS = 10
"""Steps before the first version, in which Adam's moments take their size."""
_BATCH, _TOKENS = 4, 64
_COMMON = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.catch_up", description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    report("weightsync.catch_up", measure, given.json, engines=False)


def measure() -> dict[str, Any]:
    cases = []
    for name in MODELS:
        for learning_rate in LEARNING_RATES:
            cases.append(_case(name, learning_rate))
            print(cases[-1], file=sys.stderr, flush=True)
    return {"versions": VERSIONS, "cases": cases}


def _dense(*, tied: bool) -> Any:
    from transformers import LlamaConfig

    sizes = {"intermediate_size": 704, "num_key_value_heads": 4}
    return LlamaConfig(**_COMMON, **sizes, tie_word_embeddings=tied)


def _mixture() -> Any:
    from transformers import Qwen3MoeConfig

    sizes = {"intermediate_size": 704, "num_key_value_heads": 4, "head_dim": 32}
    return Qwen3MoeConfig(**_COMMON, **sizes, **_EXPERTS, num_experts=16)


def _latent_attention() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_COMMON,
        **_EXPERTS,
        intermediate_size=704,
        num_key_value_heads=8,
        n_routed_experts=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    )


MODELS = {
    "dense, tied": lambda: _dense(tied=True),
    "dense, untied": lambda: _dense(tied=False),
    "mixture": _mixture,
    "latent attention": _latent_attention,
}


class Training:
    """A model that learns to continue sequences of a fixed stride, by AdamW."""

    def __init__(self, name: str, learning_rate: float) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(1)
        self._model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.01
        )
        for _ in range(_SETTLING_STEPS):
            self.step()

    def step(self) -> None:
        start = torch.randint(_COMMON["vocab_size"], (_BATCH, 1))
        stride = torch.randint(1, 17, (_BATCH, 1))
        tokens = (start + stride * torch.arange(_TOKENS)) % _COMMON["vocab_size"]
        self._model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state(self) -> State:
        """The tensors that a trainer publishes, tied ones under each of their names."""
        shared: dict[int, torch.Tensor] = {}
        return {
            name: shared.setdefault(tensor.data_ptr(), tensor.detach().bfloat16())
            for name, tensor in self._model.state_dict().items()
        }


def _case(name: str, learning_rate: float) -> dict[str, Any]:
    training = Training(name, learning_rate)
    states = []
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="weights-") as directory:
        stores = {skips: Path(directory) / f"skips-{skips}" for skips in (True, False)}
        with (
            Publisher(stores[True]) as skipping,
            Publisher(stores[False], versions=VersionSettings(skip_deltas=False)) as plain,
        ):
            publishers = [(True, skipping), (False, plain)]
            for _ in range(VERSIONS):
                states.append(training.state())
                # In turns, since skip deltas are made while the other publishes.
                publishers.reverse()
                for skips, publisher in publishers:
                    started = time.perf_counter()
                    publisher.publish(states[-1])
                    seconds[skips].append(time.perf_counter() - started)
                training.step()
        changed = _changed_ratio(states[0], states[1])
        with weight_server(Path(directory)) as url:
            sources: dict[str, Callable[[], Counted]] = {
                "single": lambda: CountedDirectory(stores[False]),
                "directory": lambda: CountedDirectory(stores[True]),
                "server": lambda: CountedHttp(f"{url}/stores/{stores[True].name}"),
            }
            absences = [
                {"versions": count, **_after_absence(sources, states, count)} for count in ABSENCES
            ]
        joiner = {
            skips: _read(CountedDirectory(store), None, VERSIONS, states)
            for skips, store in stores.items()
        }
        held = {skips: _stored(store) for skips, store in stores.items()}
    return {
        "model": name,
        "learning_rate": learning_rate,
        "model_bytes": sum(tensor.nbytes for tensor in states[0].values()),
        "changed_ratio": round(changed, 4),
        "absences": absences,
        "joiner_ratio": round(joiner[True] / joiner[False], 3),
        "store_ratio": round(held[True] / held[False], 3),
        "publish_ratio": round(
            statistics.median(seconds[True][1:]) / statistics.median(seconds[False][1:]), 2
        ),
    }


def _after_absence(
    sources: Mapping[str, Callable[[], Counted]], states: list[State], count: int
) -> dict[str, dict[str, float]]:
    """Bytes over those of single deltas, from the store and from its server: mean of all
    beginnings, the least and the most; that of an absence that begins at the first full
    checkpoint."""
    read = {
        name: [
            _read(source(), start, start + count, states)
            for start in range(1, VERSIONS - count + 1)
        ]
        for name, source in sources.items()
    }
    single = read.pop("single")
    return {name: _ratios(found, single) for name, found in read.items()}


def _ratios(found: list[int], single: list[int]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(found, single, strict=True)]
    return {
        "mean": round(statistics.mean(ratios), 3),
        "min": round(min(ratios), 3),
        "max": round(max(ratios), 3),
        "from_full": round(ratios[0], 3),
    }


def _read(source: Counted, held: int | None, target: int, states: list[State]) -> int:
    """Bytes that a receiver at a version reads. It has read the indexes back to the full checkpoint
    before, as a running one has."""
    receiver = Receiver(source)
    begin = states[0] if held is None else states[held - 1]
    tensors = {name: tensor.clone() for name, tensor in begin.items()}
    current = None if held is None else WeightVersion(held)
    if current is not None:
        receiver.plan(None, current)
    before = source.read_total
    receiver.sync(current, WeightVersion(target), TensorTarget(tensors))
    receiver.close()
    if any(not torch.equal(tensors[name], states[target - 1][name]) for name in tensors):
        raise AssertionError(f"version {target} is not what was published")
    return source.read_total - before


def _changed_ratio(old: State, new: State) -> float:
    changed = sum(int((old[name] != new[name]).sum()) for name in old)
    return changed / sum(tensor.numel() for tensor in old.values())


def _stored(store: Path) -> int:
    return sum(file.stat().st_size for file in store.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
