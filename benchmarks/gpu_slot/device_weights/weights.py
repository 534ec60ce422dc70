"""Weight versions on the device that serves them: is the outcome the host's, and how fast is it?

A delta of our codec, made from a step of an 8B model's weights, is applied by the loops of the host
and by the device; the state is hashed by the library and by the device's kernels. Everything is
compared bit for bit, and one flipped bit has to be noticed. See state.py.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch

from benchmarks.gpu_slot.device_weights.state import (
    LLAMA_8B,
    TINY,
    State,
    drawn,
    step_std,
    stepped,
)
from benchmarks.gpu_slot.device_weights.timing import (
    median_s,
    most_bytes,
    rate,
    restart_most_bytes,
    seconds_of,
    speeds,
)
from weightsync.elements.batches import each
from weightsync.elements.bits import bits_of, spec_of
from weightsync.elements.device_hash import digests_on_device, is_proven
from weightsync.elements.state_hash import digest_of
from weightsync.encoding.codec import Encoded, Encoding, decode, encode, encode_as, warm_up
from weightsync.encoding.delta import Delta, checked_apply
from weightsync.vllm.device_delta import MOST_DEVICE_BYTES, apply_on_device

Put: TypeAlias = Callable[[str, Any], None]

SHARES = (0.01, 0.001, 0.1)
"""Shares of the elements that change; an ordinary step first, should the time run out."""
THREADS = 2
"""Threads on the host, as in an engine."""
_SEED = 20240607
_RUNS = 3
_SMALL_TENSORS = 64
_GATE = "model.layers.0.mlp.gate_proj.weight"


def measured(kind: str, *, tiny: bool, put: Put) -> None:
    """`kind` is `cuda` or `cpu`; `put` takes each result as soon as it is there."""
    # With its number, as tensors name it.
    device = torch.empty(0, device=kind).device
    state = drawn(TINY if tiny else LLAMA_8B, device, seed=_SEED)
    put("state", {"bytes": _size(state), "tensors": len(state), "threads": THREADS})
    host = {name: tensor.cpu() for name, tensor in state.items()}
    put("hash", _hash(state, host))
    put("control", _control(state))
    put("warm_up", {"s": seconds_of(device, lambda: warm_up({2}))})
    for share in SHARES:
        put(f"delta_{share:g}", _delta(state, host, share))
    put("encodings", _encodings(state[_GATE], host[_GATE]))
    put("small_tensors", _small_tensors(device))


def _hash(state: State, host: State) -> dict[str, Any]:
    """GB/s count every byte of the state once; a copy reads and writes it."""
    device, size = _device_of(state), _size(state)
    expected = dict(zip(host, _host_digests(host), strict=True))
    largest = max(state, key=lambda name: state[name].nbytes)
    first_s = seconds_of(device, lambda: is_proven(device))
    found = digests_on_device(state)
    host_s = median_s(device, lambda: _host_digests(host))
    carried_s = median_s(
        device, lambda: _host_digests({name: state[name].cpu() for name in state}), runs=1
    )
    device_s = median_s(device, lambda: digests_on_device(state))
    alone_s = median_s(device, lambda: digests_on_device({largest: state[largest]}))
    by_kernels = is_proven(device)
    copy = torch.empty_like(state[largest])
    copy_s = median_s(device, lambda: copy.copy_(state[largest]))
    return {
        "by_kernels": by_kernels,
        "equal": found == expected,
        "first_s": first_s,
        # Without kernels the library has hashed, and the time is the host's.
        "device_s": device_s if by_kernels else None,
        "device_gb_per_s": rate(size, device_s) if by_kernels else None,
        "largest_tensor_bytes": state[largest].nbytes,
        "largest_tensor_alone_s": alone_s,
        "host_gb_per_s": rate(size, host_s),
        "carried_to_host_s": carried_s,
        "copy_read_gb_per_s": rate(copy.nbytes, copy_s),
    }


def _control(state: State) -> dict[str, Any]:
    """Control with one bit of one tensor flipped: the digest and the comparison must report it."""
    name = max(state, key=lambda name: state[name].nbytes)
    held = {name: state[name].clone()}
    before = digests_on_device(held)
    held[name].view(-1).view(torch.int16)[held[name].numel() // 3] ^= 1
    return {
        "digest_differs": digests_on_device(held) != before,
        "bytes_differ": not _same(held, {name: state[name].cpu()}),
    }


def _delta(state: State, host: State, share: float) -> dict[str, Any]:
    """One step of the whole state, on the host and on the device."""
    device, size = _device_of(state), _size(state)
    encoded, encode_s = _encoded(state, host, share)
    started = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        decoded = pool.map(lambda name: _decoded(encoded[name], state[name]), encoded)
        deltas = dict(zip(encoded, decoded, strict=True))
    decode_s = time.perf_counter() - started
    on_host, host_s = _applied(host, deltas, _on_host)
    restart_most_bytes(device)
    on_device, device_s = _applied(state, deltas, apply_on_device)
    peak = most_bytes(device) - 2 * size
    digests = digests_on_device({name: on_device[name] for name in encoded})
    payload = sum(len(one.payload) for one in encoded.values())
    return {
        "changed_ratio": sum(one.changed for one in encoded.values()) / (size // 2),
        "kinds": Counter(type(delta).__name__ for delta in deltas.values()),
        "payload_bytes": payload,
        "encode_s": encode_s,
        "decode_s": decode_s,
        "equal": _same(on_device, on_host),
        "digests_equal": all(digests[name] == encoded[name].digest for name in encoded),
        "device_bytes": peak if device.type == "cuda" else None,
        "device_bytes_max": THREADS * MOST_DEVICE_BYTES,
        "host": speeds(host_s, size, payload),
        "device": speeds(device_s, size, payload),
    }


def _encoded(state: State, host: State, share: float) -> tuple[dict[str, Encoded], float]:
    """Payloads of the tensors that changed; seconds of the codec alone."""
    std = step_std(share, _device_of(state))
    news = {
        name: stepped(tensor, std, seed=number).cpu()
        for number, (name, tensor) in enumerate(state.items())
    }
    started = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda name: encode(bits_of(host[name]), bits_of(news[name])), news)
        encoded = {name: one for name, one in zip(news, made, strict=True) if one is not None}
    return encoded, time.perf_counter() - started


def _encodings(old: torch.Tensor, on_host: torch.Tensor) -> dict[str, Any]:
    """One matrix, 1 % of it changed, in every encoding that an accelerator takes."""
    new = stepped(old, step_std(0.01, old.device), seed=0).cpu()
    found = {}
    for encoding in [one for one in Encoding if one is not Encoding.CONTEXT]:
        encoded = encode_as(encoding, bits_of(on_host), bits_of(new))
        assert encoded is not None
        started = time.perf_counter()
        delta = _decoded(encoded, old)
        decode_s = time.perf_counter() - started
        host, host_s = _applied({_GATE: on_host}, {_GATE: delta}, _on_host)
        device, device_s = _applied({_GATE: old}, {_GATE: delta}, apply_on_device)
        payload = len(encoded.payload)
        found[encoding.value] = {
            "payload_bytes": payload,
            "decode_s": decode_s,
            "equal": _same(device, host) and _same(device, {_GATE: new}),
            "host": speeds(host_s, old.nbytes, payload),
            "device": speeds(device_s, old.nbytes, payload),
        }
    return found


def _small_tensors(device: torch.device) -> dict[str, Any]:
    """Tensors of 8 KiB, as norms are: changed there, and carried to the host and back."""
    generator = torch.Generator().manual_seed(_SEED)
    old = {
        f"{n}.weight": torch.randn(4096, generator=generator).mul_(0.02).bfloat16()
        for n in range(_SMALL_TENSORS)
    }
    std = step_std(0.01, torch.device("cpu"))
    deltas: dict[str, Delta] = {}
    for name, tensor in old.items():
        encoded = encode(bits_of(tensor), bits_of(stepped(tensor, std, seed=len(deltas))))
        if encoded is not None:
            deltas[name] = _decoded(encoded, tensor)
    state = {name: tensor.to(device) for name, tensor in old.items()}

    def carried(delta: Delta, held: torch.Tensor) -> None:
        there = held.cpu()
        checked_apply(delta, bits_of(there))
        held.copy_(there)

    by_device, device_s = _applied(state, deltas, apply_on_device)
    by_host, carried_s = _applied(state, deltas, carried)
    return {
        "tensors": len(deltas),
        "equal": _same(by_device, by_host),
        "device_us_each": 1e6 * device_s[-1] / max(1, len(deltas)),
        "carried_us_each": 1e6 * carried_s[-1] / max(1, len(deltas)),
    }


def _applied(
    state: State, deltas: Mapping[str, Delta], apply: Callable[[Delta, torch.Tensor], object]
) -> tuple[dict[str, torch.Tensor], Sequence[float]]:
    """A changed copy of the state, and seconds of each run, the first one among them."""
    device = _device_of(state)
    held = {name: tensor.clone() for name, tensor in state.items()}
    # Largest first, as an engine does.
    names = sorted(deltas, key=lambda name: -state[name].nbytes)

    def change(name: str) -> None:
        apply(deltas[name], held[name])

    def change_all() -> None:
        each(pool, change, names, lambda name: state[name].nbytes)

    seconds = []
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(1 + _RUNS):
            for name, tensor in state.items():
                held[name].copy_(tensor)
            seconds.append(seconds_of(device, change_all))
    return held, seconds


def _on_host(delta: Delta, held: torch.Tensor) -> None:
    """Applies the delta as an engine on the host does, with hashing."""
    checked_apply(delta, bits_of(held), hashed=True)


def _decoded(encoded: Encoded, tensor: torch.Tensor) -> Delta:
    return decode(encoded.encoding, memoryview(encoded.payload), spec_of(tensor))


def _host_digests(state: State) -> list[str]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda name: digest_of(bits_of(state[name])), state))


def _same(there: State, host: State) -> bool:
    """Whether all bytes are equal, compared on the host."""
    return all(
        np.array_equal(bits_of(there[n].cpu()), bits_of(tensor)) for n, tensor in host.items()
    )


def _size(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _device_of(state: State) -> torch.device:
    return next(iter(state.values())).device
