"""An engine's answers about itself: which process it is, and what it can serve.

    GET /rosemux/engine -> EngineReport

Each reply of such an engine carries `ENGINE_HEADER`: its instance and how often its weights may
have changed since it started. Two replies with the same value come from the same process with the
same weights. Decides nothing; stock vLLM has neither the route nor the header.
"""

from enum import StrEnum

import msgspec

ENGINE_HEADER = "X-RoseMux-Engine"
ENGINE_ROUTE = "/rosemux/engine"
IDENTITY = ("--middleware", "coserve.vllm.identity.IdentityMiddleware")
"""Flags of an engine whose replies carry the header. The last middleware is the outermost: refusals
of the others carry the identity as well."""
CONTINUATION_FEATURE = "rosemux-continuation"
"""The engine takes a request with the output that another engine has made for it."""
WEIGHTS_FEATURE = "rosemux-weights"
"""The engine follows versions and reports its workers' weights by `/collective_rpc`."""
FIRST_CORE_FEATURE = "rosemux-first-core"
"""One server of several engine cores (data-parallel ranks), whose `/collective_rpc` answers with
the first core's workers alone: the weights of the others are not seen."""


class WorkerMethod(StrEnum):
    WEIGHTS = "rosemux_weights"
    STAGE = "rosemux_stage"


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that hold for the whole life of an engine process. Zero and "" mean unknown."""

    model: str = ""
    """The name under which it serves its model."""
    architecture: str = ""
    context_tokens: int = 0
    """Prompt and output of one turn together (vLLM's `max_model_len`)."""
    vocabulary: int = 0
    """Token ids lie below this number."""
    dtype: str = ""
    logprobs_mode: str = ""
    """vLLM's `--logprobs-mode`: log-probabilities before or after temperature and top-p."""
    features: tuple[str, ...] = ()

    @property
    def fault(self) -> str:
        """Why its log-probabilities are not those of the policy that sampled; "" if they may be."""
        if self.logprobs_mode in ("", "processed_logprobs"):
            return ""
        return f"it reports {self.logprobs_mode}: start it with --logprobs-mode processed_logprobs"

    def disagreement(self, other: "EngineDescription") -> str:
        """Why the two cannot make tokens of one job; "" if they can. Unknown facts agree."""
        for what in ("architecture", "vocabulary"):
            mine, its = getattr(self, what), getattr(other, what)
            if mine and its and mine != its:
                return f"{what} {mine}, not {its}"
        return ""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    identity: str
    """Value of `ENGINE_HEADER`."""
    description: EngineDescription
    slot: str = ""
    """The slot whose guest it is, where `rosemux guest` started it."""
