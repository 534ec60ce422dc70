"""Tinker: its service and sampling clients, several samples of each prompt, one version pinned."""

import tinker
from tinker import types

from tests.clients.client_facts import JOB, URL, Facts

PROMPTS = 6
SAMPLES = 3
MAX_TOKENS = 16
CANDIDATES = 3


def main() -> None:
    facts = Facts()
    with tinker.ServiceClient(base_url=URL, api_key="tml-none") as service:
        (name, *_) = [m.model_name for m in service.get_server_capabilities().supported_models]
        assert name, "the gateway names no model"
        sampler = service.create_sampling_client(base_model=JOB).result()
        wanted = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, stop=[])
        futures = [
            sampler.sample(
                prompt=types.ModelInput.from_ints([1, 10 + number, 20, 30]),
                num_samples=SAMPLES,
                sampling_params=wanted,
                topk_sample_logprobs=CANDIDATES,
            )
            for number in range(PROMPTS)
        ]
        for future in futures:
            sequences = future.result().sequences
            assert len(sequences) == SAMPLES
            assert len({each.sequence_id for each in sequences}) == SAMPLES
            for sequence in sequences:
                assert sequence.stop_reason == "length", sequence
                assert len(sequence.tokens) == MAX_TOKENS
                assert sequence.logprobs is not None
                assert sequence.topk_logprobs is not None
                assert len(sequence.topk_logprobs) == MAX_TOKENS
                facts.turn(sequence.tokens, sequence.logprobs)
        scored(sampler, facts)
        refused_in_words(service)
    facts.report(client=tinker.__version__)


def scored(sampler: tinker.SamplingClient, facts: Facts) -> None:
    """Scores of a prompt equal those of the same tokens when they were sampled. The client's own
    `compute_logprobs` is this call without the token that is made."""
    start = [1, 50, 20, 30]
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    made = sampler.sample(types.ModelInput.from_ints(start), 1, greedy).result().sequences[0]
    assert made.logprobs is not None
    facts.turn(made.tokens, made.logprobs)
    prompt = types.ModelInput.from_ints([*start, *made.tokens])
    one = types.SamplingParams(max_tokens=1, temperature=0.0, stop=[])
    reply = sampler.sample(prompt, 1, one, include_prompt_logprobs=True).result(timeout=60)
    facts.turn(reply.sequences[0].tokens, reply.sequences[0].logprobs)
    found = reply.prompt_logprobs
    assert found is not None
    assert found[0] is None
    for score, sampled in zip(found[len(start) :], made.logprobs, strict=True):
        assert score is not None
        assert abs(score - sampled) < 1e-3, (found, made.logprobs)


def refused_in_words(service: tinker.ServiceClient) -> None:
    """A call that is not offered ends as an error that names it; none waits for ever."""
    refused = ""
    try:
        service.create_sampling_client(model_path="tinker://other/weights").result(timeout=30)
    except tinker.BadRequestError as error:
        refused = str(error)
    assert "tinker://" in refused, f"tinker:// was not refused: {refused}"


if __name__ == "__main__":
    main()
