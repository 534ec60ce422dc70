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
        refused_in_words(service, sampler)
    facts.report(client=tinker.__version__)


def refused_in_words(service: tinker.ServiceClient, sampler: tinker.SamplingClient) -> None:
    """A call that is not offered ends as an error that names it; none waits for ever."""
    prompt = types.ModelInput.from_ints([1, 2, 3])
    for name, ask in (
        ("prompt_logprobs", lambda: sampler.compute_logprobs(prompt)),
        ("tinker://", lambda: service.create_sampling_client(model_path="tinker://other/weights")),
    ):
        refused = ""
        try:
            ask().result(timeout=30)
        except tinker.BadRequestError as error:
            refused = str(error)
        assert name in refused, f"{name} was not refused: {refused}"


if __name__ == "__main__":
    main()
