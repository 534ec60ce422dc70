"""Entry point `vllm.general_plugins`: a request may bring output that another engine has made.

Such a request goes on as if this engine had preempted and resumed it: its emitted tokens are
output, not prompt. They count for penalties, bad words, `min_tokens`, `max_tokens` and thinking
budgets, the grammar has accepted them, and a stop string may begin in them. The gateway sends them
in vLLM's `extra_args` (EMITTED_ARGUMENT); only rollout engines, which follow a weight store,
accept the argument. The stream carries what this engine adds.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.environment import Role, slot_environment
from coserve.vllm.launch import WEIGHT_ROOT_VARIABLE
from coserve.vllm.thinking_budgets import kept_apart, replaying_output
from harvester.contracts.stock_fallback import guarded
from harvester.contracts.wire.rollouts import EMITTED_ARGUMENT

_registered = False


def accepts_emitted_output() -> bool:
    """Whether requests of this process may bring output."""
    return _registered


def register() -> None:
    """Called by vLLM in each of its processes; does nothing but in a rollout engine."""
    guarded(_register)


def _register() -> None:
    global _registered
    environment = slot_environment()
    production = environment is not None and environment.role is Role.PRODUCTION
    if _registered or production or not os.environ.get(WEIGHT_ROOT_VARIABLE):
        return
    capabilities(installed_vllm_version())
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.request import Request
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    InputProcessor.process_inputs = _checked(InputProcessor.process_inputs)
    RequestState.from_new_request = classmethod(
        _with_emitted_text(RequestState.from_new_request.__func__)
    )
    Request.__init__ = _resumed(Request.__init__)
    StructuredOutputManager._create_grammar = _advanced(StructuredOutputManager._create_grammar)
    CachedRequestState.__post_init__ = _with_output(CachedRequestState.__post_init__)
    replaying_output(ThinkingBudgetStateHolder)
    kept_apart(ThinkingBudgetStateHolder)
    _registered = True


def emitted_tokens(sampling_params: Any) -> list[int]:
    """Output that the request brings, as `_checked` let it in; [] without any."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    emitted: list[int] = extra.get(EMITTED_ARGUMENT) or []
    return emitted


def _checked(process_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """The front end refuses what the engine's core could not bear: its caller gets a 400."""

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        params = request.sampling_params
        emitted = emitted_tokens(params)
        if not emitted:
            return request
        bound = self.model_config.get_vocab_size()
        if not isinstance(emitted, list) or not all(
            type(token) is int and 0 <= token < bound for token in emitted
        ):
            raise ValueError(f"{EMITTED_ARGUMENT}: send a list of token ids below {bound}")
        if request.prompt_token_ids is None or params.prompt_logprobs is not None or params.n != 1:
            raise ValueError(
                f"{EMITTED_ARGUMENT}: needs a prompt of token ids, one sample of it "
                "and no prompt log-probabilities"
            )
        if len(emitted) >= params.max_tokens:
            raise ValueError(f"{EMITTED_ARGUMENT}: {len(emitted)} tokens fill max_tokens")
        context_tokens = self.model_config.max_model_len
        if len(request.prompt_token_ids) + len(emitted) >= context_tokens:
            raise ValueError(
                f"{EMITTED_ARGUMENT}: prompt and output fill the context of {context_tokens} tokens"
            )
        return request

    return checked


def _with_emitted_text(from_new_request: Callable[..., Any]) -> Callable[..., Any]:
    """The detokenizer: text before the seam is known, so that stop strings may begin in it."""

    def with_emitted_text(cls: Any, *args: Any, **kwargs: Any) -> Any:
        state = from_new_request(cls, *args, **kwargs)
        request = kwargs["request"] if "request" in kwargs else args[1]
        if emitted := emitted_tokens(request.sampling_params):
            state.detokenizer.update(emitted, False)
            state.detokenizer.get_next_output_text(False, True)
            state.sent_tokens_offset = len(emitted)
        return state

    return with_emitted_text


def _resumed(init: Callable[..., None]) -> Callable[..., None]:
    """The scheduler: the request counts as preempted once, with its output."""

    def resumed(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if emitted := emitted_tokens(self.sampling_params):
            self.append_output_token_ids(emitted)
            self.num_preemptions = 1

    return resumed


def _with_output(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """The worker's runner, version 1; version 2 is given output by the scheduler."""

    def with_output(self: Any) -> None:
        post_init(self)
        emitted: Sequence[int] = emitted_tokens(self.sampling_params)
        if emitted and not self.output_token_ids:
            self.output_token_ids = list(emitted)

    return with_output


def _advanced(create_grammar: Callable[..., Any]) -> Callable[..., Any]:
    """Structured output: advances a new grammar by the emitted tokens."""

    def advanced(self: Any, request: Any, *args: Any) -> Any:
        grammar = create_grammar(self, request, *args)
        constrained = _constrained(self, request, emitted_tokens(request.sampling_params))
        if constrained and not grammar.accept_tokens(request.request_id, constrained):
            raise ValueError(f"{EMITTED_ARGUMENT}: the grammar does not accept these tokens")
        return grammar

    return advanced


def _constrained(manager: Any, request: Any, emitted: list[int]) -> list[int]:
    """The emitted tokens after reasoning, which no grammar constrains."""
    structured = request.structured_output_request
    reasoner = manager._get_reasoner(request)
    if not emitted or reasoner is None or manager.enable_in_reasoning or structured.reasoning_ended:
        return emitted
    if reasoner.is_reasoning_end(request.prompt_token_ids or []):
        return emitted
    if not reasoner.is_reasoning_end(list(request.all_token_ids)):
        return []
    structured.reasoning_ended = True
    return list(reasoner.extract_content_ids(emitted))
