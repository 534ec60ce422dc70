"""The wheels that a machine lacks, computed from metadata against the list of what it has.

Fetches nothing itself and installs nothing. A present distribution is taken as it is: its own
requirements are met there, and a version outside a requirement is reported, not replaced.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

from deploy.gpu.wheel import CarryError, Wheel

Fetch = Callable[[NormalizedName, SpecifierSet], Wheel]
Present = Mapping[NormalizedName, Version | None]
"""Version None: the distribution is present in an unrecorded version."""

TARGET_ENVIRONMENT = {
    "implementation_name": "cpython",
    "implementation_version": "3.12.3",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_release": "",
    "platform_system": "Linux",
    "platform_version": "",
    "python_full_version": "3.12.3",
    "python_version": "3.12",
    "sys_platform": "linux",
}
ROUNDS_LIMIT = 64
"""Each round fetches at least one wheel with a narrower version, so real trees end far earlier."""


@dataclass(slots=True)
class Want:
    """All requirements on one distribution, joined."""

    specifier: SpecifierSet = field(default_factory=SpecifierSet)
    extras: set[str] = field(default_factory=set)
    required_by: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Mismatch:
    name: NormalizedName
    present: Version | None
    required: SpecifierSet
    required_by: tuple[str, ...]

    def __str__(self) -> str:
        there = f"is {self.present}" if self.present else "is there in an unknown version"
        return f"{self.name} {there}, required {self.required} by {', '.join(self.required_by)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    wheels: tuple[Wheel, ...]
    mismatches: tuple[Mismatch, ...]
    """Present in another version than required, or pinned while the version there is unknown."""
    left_out: tuple[NormalizedName, ...]
    """Wanted, neither present nor carried, as the list of what stays out says."""


def read_names(text: str) -> dict[NormalizedName, Version | None]:
    """One distribution a line, `name` or `name==version`; `#` begins a comment."""
    names: dict[NormalizedName, Version | None] = {}
    for line in text.splitlines():
        if entry := line.partition("#")[0].strip():
            name, _, version = entry.partition("==")
            names[canonicalize_name(name.strip(), validate=True)] = (
                Version(version) if version else None
            )
    return names


def read_requirements(text: str) -> dict[NormalizedName, SpecifierSet]:
    """One requirement a line; `#` begins a comment."""
    entries = (line.partition("#")[0].strip() for line in text.splitlines())
    requirements = [Requirement(entry) for entry in entries if entry]
    return {canonicalize_name(each.name): each.specifier for each in requirements}


def missing_wheels(
    roots: Iterable[Wheel],
    requirements: Iterable[Requirement] = (),
    *,
    present: Present,
    left_out: Iterable[NormalizedName],
    fetch: Fetch,
    replaced: Mapping[NormalizedName, SpecifierSet] | None = None,
) -> Missing:
    """Fetch every requirement that is neither present nor left out, and theirs.

    `roots` are wheels that travel anyway; they are not among the result's wheels. `replaced`
    stands in the place of all requirements on a distribution and asks for nothing itself: there
    is no search for versions that fit each other.
    """
    fixed = {wheel.name: wheel for wheel in roots}
    asked = tuple(requirements)
    out = frozenset(left_out)
    fetched: dict[NormalizedName, Wheel] = {}
    for _ in range(ROUNDS_LIMIT):
        wants = _wants(asked, fixed, fetched)
        for name, specifier in (replaced or {}).items():
            if name in wants:
                wants[name].specifier = specifier
        missing = sorted(wants.keys() - present.keys() - out - fixed.keys())
        due = [
            name
            for name in missing
            if name not in fetched or not _fits(fetched[name].version, wants[name])
        ]
        if not due:
            return Missing(
                wheels=tuple(fetched[name] for name in missing),
                mismatches=tuple(_mismatches(wants, present)),
                left_out=tuple(sorted((wants.keys() & out) - present.keys())),
            )
        for name in due:
            fetched[name] = fetch(name, wants[name].specifier)
            if not _fits(fetched[name].version, wants[name]):
                raise CarryError(f"{name} {fetched[name].version} is not {wants[name].specifier}")
    raise CarryError(f"requirements did not settle in {ROUNDS_LIMIT} rounds")


def _wants(
    asked: tuple[Requirement, ...],
    fixed: Mapping[NormalizedName, Wheel],
    fetched: Mapping[NormalizedName, Wheel],
) -> dict[NormalizedName, Want]:
    wants: dict[NormalizedName, Want] = {}
    pending = [(requirement, "the command line") for requirement in asked]
    for wheel in fixed.values():
        pending += _active(wheel, "")
    while pending:
        requirement, required_by = pending.pop()
        name = canonicalize_name(requirement.name)
        first = name not in wants
        want = wants.setdefault(name, Want())
        want.specifier &= requirement.specifier
        want.required_by.add(required_by)
        new_extras = requirement.extras - want.extras
        want.extras |= new_extras
        if name in fetched:
            for extra in ["", *new_extras] if first else new_extras:
                pending += _active(fetched[name], extra)
    return wants


def _active(wheel: Wheel, extra: str) -> list[tuple[Requirement, str]]:
    environment = TARGET_ENVIRONMENT | {"extra": extra}
    return [
        (requirement, str(wheel.name))
        for requirement in wheel.requires
        if requirement.marker is None or requirement.marker.evaluate(environment)
    ]


def _fits(version: Version, want: Want) -> bool:
    return want.specifier.contains(version, prereleases=True)


def _mismatches(wants: Mapping[NormalizedName, Want], present: Present) -> Iterable[Mismatch]:
    for name in sorted(wants.keys() & present.keys()):
        version, want = present[name], wants[name]
        if version is None:
            # An unknown version is doubtful under an upper bound or a pin alone.
            doubtful = any(spec.operator in {"==", "<", "<=", "~="} for spec in want.specifier)
        else:
            doubtful = not _fits(version, want)
        if doubtful:
            yield Mismatch(name, version, want.specifier, tuple(sorted(want.required_by)))
