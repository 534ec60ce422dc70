"""Packages that travel: vLLM's version, RoseMux's own requirements, kvcached's source."""

import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.gpu.missing import TARGET_ENVIRONMENT, Present
from deploy.gpu.wheel import CarryError, Wheel

DEFAULT_VLLM = "0.26.0"
KVCACHED = "kvcached==0.1.6"
KVCACHED_REQUIREMENTS = ("posix-ipc>=1.0", "wrapt>=1.15")
"""kvcached travels as source, whose metadata no wheel states."""
EXTRAS = ("rollmux", "weights")
TEST_REQUIREMENTS = ("async-solipsism", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")


def rosemux_requirements(pyproject: str) -> list[Requirement]:
    """Its dependencies, those of its extras, and those of `dev` that the tests on a GPU import."""
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    dev = map(Requirement, extras["dev"])
    required = {canonicalize_name(name) for name in TEST_REQUIREMENTS}
    tests = [each for each in dev if canonicalize_name(each.name) in required]
    own = {each: None for extra in EXTRAS for each in extras[extra]}
    return [*map(Requirement, [*project["dependencies"], *own]), *tests]


def refuse_another_torch(vllm: Wheel, present: Present) -> None:
    """vLLM's kernels are compiled against one torch; another one there cannot load them."""
    for requirement in vllm.requires:
        if canonicalize_name(requirement.name) != "torch":
            continue
        if requirement.marker and not requirement.marker.evaluate(TARGET_ENVIRONMENT):
            continue
        there = present.get(canonicalize_name("torch"))
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            raise CarryError(
                f"vLLM {vllm.version} wants torch{requirement.specifier}, "
                f"the machine has torch {there or 'in an unknown version'}"
            )
