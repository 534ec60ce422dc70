"""Adapters in vLLM's own LoRA manager, under the names that requests use.

A request selects an adapter through vLLM's `LoRARequest` with the path `rosemux:NAME`. Wherever
vLLM would read that path, it is given the version in force instead: when a request first names the
adapter, and again after its own manager has dropped it, as vLLM from 0.31 on does at every update
of weights. The runtime form of an adapter (scaled, packed, padded) is vLLM's.
"""

from collections import defaultdict
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from harvester.contracts.errors import ConfigError, Unsupported
from weightsync.vllm.adapter_names import adapter_name
from weightsync.vllm.rank_parts import missing_layers

_SLOTS = "rosemux_lora_slots"
_ORIGINAL = "rosemux_original"
_PROBE_ID = (1 << 31) - 1
"""An unused adapter id: vLLM counts a server's adapters from 1."""


class LoraSlots:
    """`model`: a model that vLLM has wrapped for LoRA."""

    def __init__(self, model: Any, vllm_config: Any, device: torch.device) -> None:
        from vllm.lora.worker_manager import WorkerLoRAManager

        self._manager: Any = model.lora_manager
        self._reader: Any = WorkerLoRAManager(
            vllm_config, device, getattr(model, "embedding_modules", {})
        )
        self._reader._adapter_manager = self._manager
        self._forms: dict[str, Any] = {}
        self._ids: dict[str, set[int]] = defaultdict(set)
        """Ids under which vLLM holds each adapter in force."""
        _install()
        setattr(model, _SLOTS, self)

    def read(self, directory: Path) -> Any:
        from vllm.lora.request import LoRARequest

        request = LoRARequest("rosemux-read", _PROBE_ID, str(directory))
        try:
            form = self._reader._load_adapter(request)
        except Exception as error:
            raise Unsupported(f"vLLM takes no such adapter: {error}") from error
        self._check_places(form)
        return form

    def check(self, form: Any) -> None:
        try:
            self._activate(form, _PROBE_ID)
        except Exception as error:
            raise ConfigError(f"the adapter does not fit this model: {error}") from error
        finally:
            self._manager.remove_adapter(_PROBE_ID)

    def put(self, name: str, form: Any) -> None:
        self.check(form)
        held = self._ids[name].intersection(self._manager.list_adapters())
        for number in sorted(held):
            self._activate(form, number)
        self._ids[name] = held
        self._forms[name] = form

    def in_force(self, name: str, number: int) -> Any:
        """The adapter in force under a name, as vLLM's `number`; raises ConfigError without one."""
        if name not in self._forms:
            raise ConfigError(f"no version of adapter {name} is in force: load one first")
        self._ids[name].add(number)
        return _numbered(self._forms[name], number)

    def _check_places(self, form: Any) -> None:
        """Raises Unsupported if vLLM would silently drop a part of the adapter."""
        places = {*self._manager.modules, *chain(*self._manager.packed_modules.values())}
        elsewhere = missing_layers(self._manager.model)
        for name in sorted(form.loras.keys() - places):
            if not any(name == layer or name.startswith(f"{layer}.") for layer in elsewhere):
                raise Unsupported(
                    f"the adapter has weights for {name}, where this engine takes none: is it "
                    "another model's, or do --lora-target-modules leave that layer out?"
                )

    def _activate(self, form: Any, number: int) -> None:
        self._manager.remove_adapter(number)
        self._manager.add_adapter(_numbered(form, number))
        self._manager.activate_adapter(number)


def _numbered(form: Any, number: int) -> Any:
    """A copy for vLLM, which scales and packs its argument in place."""
    copied = deepcopy(form)
    copied.id = number
    return copied


def _install() -> None:
    """Make vLLM's workers find RoseMux adapters. Idempotent."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    original: Any = WorkerLoRAManager._load_adapter
    if hasattr(original, _ORIGINAL):
        return

    def load_adapter(self: Any, lora_request: Any) -> Any:
        name = adapter_name(lora_request.lora_path)
        slots = getattr(self._adapter_manager.model, _SLOTS, None)
        if name is None or slots is None:
            return original(self, lora_request)
        return slots.in_force(name, lora_request.lora_int_id)

    setattr(load_adapter, _ORIGINAL, original)
    WorkerLoRAManager._load_adapter = load_adapter
