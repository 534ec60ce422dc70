"""How requests name an adapter that follows a store: `model` in HTTP, `rosemux:NAME` as its path.

In a server's front end, vLLM's hook for names that it does not know (`LoRAResolver`) turns the
first into the second, where VLLM_ALLOW_RUNTIME_LORA_UPDATING lets it ask. Whether there is such an
adapter only the workers know (lora_slots.py).
"""

from typing import Any

from harvester.contracts.ids import is_name

_SCHEME = "rosemux:"
_RESOLVER = "rosemux"


def adapter_path(name: str) -> str:
    """The path that selects a RoseMux adapter."""
    return f"{_SCHEME}{name}"


def adapter_name(path: str) -> str | None:
    """The adapter that a path stands for; None for any other path."""
    name = path.removeprefix(_SCHEME)
    return name if path.startswith(_SCHEME) and is_name(name) else None


def register_resolver() -> None:
    """Has this process resolve model names to adapters; a second call changes nothing."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    class AdapterResolver(LoRAResolver):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:  # noqa: ARG002
            # The server gives the number.
            return (
                LoRARequest(lora_name, 1, adapter_path(lora_name)) if is_name(lora_name) else None
            )

    if _RESOLVER not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(_RESOLVER, AdapterResolver())
