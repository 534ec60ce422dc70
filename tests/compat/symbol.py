"""One row of the upstream table: a name of vLLM, and the form in which an adapter relies on it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tests.compat.upstream_versions import UpstreamVersion


class Use(StrEnum):
    """How an adapter uses a name, and thus the condition that must hold."""

    READ = "read"
    """The name exists; its definition mentions each string of `details`."""

    ASK = "ask"
    """Its definition uses each attribute of `details`: RoseMux relies on being asked there."""

    OVERRIDE = "override"
    """RoseMux replaces it: its parameters are exactly `details`."""

    CALL = "call"
    """RoseMux calls it with `details`: those are parameters, and every other one has a default."""

    SUBCLASS = "subclass"
    """RoseMux derives from it: its bases are exactly `details`."""

    ROUTE = "route"
    """An HTTP route of the module: `name` is its path, `details` its method."""


def always(_: UpstreamVersion) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Symbol:
    """One upstream name in the form that an adapter relies on."""

    use: Use
    module: str
    name: str
    details: tuple[str, ...] = ()
    when: Callable[[UpstreamVersion], bool] = always


def reads(module: str, *names: str) -> tuple[Symbol, ...]:
    return tuple(Symbol(Use.READ, module, name) for name in names)


def overrides(
    module: str, owner: str, methods: Mapping[str, tuple[str, ...]]
) -> tuple[Symbol, ...]:
    return tuple(
        Symbol(Use.OVERRIDE, module, f"{owner}.{name}", parameters)
        for name, parameters in methods.items()
    )


def asks(module: str, definitions: Mapping[str, tuple[str, ...]]) -> tuple[Symbol, ...]:
    return tuple(
        Symbol(Use.ASK, module, name, attributes) for name, attributes in definitions.items()
    )
