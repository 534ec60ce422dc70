from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.grpo.microbatch import microbatches
from examples.grpo.model import PolicyModel
from examples.grpo.policy_shape import PolicyShape


@dataclass(frozen=True)
class Sequence:
    token_ids: tuple[int, ...]
    is_output: tuple[bool, ...]


def sequence(outputs: list[bool], first: int) -> Sequence:
    ids = tuple((first + i) % 30 for i in range(len(outputs) + 1))
    return Sequence(ids, (False, *outputs))


sequences = st.lists(
    st.builds(sequence, st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 29)),
    max_size=20,
)


@given(sequences, st.integers(1, 200))
def test_every_sequence_and_each_of_its_output_tokens_is_there_once(
    given_sequences: list[Sequence], tokens_max: int
) -> None:
    parts = microbatches(given_sequences, tokens_max=tokens_max)
    assert sorted(m for part in parts for m in part.members) == list(range(len(given_sequences)))
    for part in parts:
        assert part.labels.tolist() == [
            token_id
            for m in part.members
            for token_id, own in zip(
                given_sequences[m].token_ids, given_sequences[m].is_output, strict=True
            )
            if own
        ]
        following = part.token_ids.flatten()[part.predictors + 1]
        assert torch.equal(following, part.labels)


@given(sequences, st.integers(1, 200))
def test_rectangles_stay_within_the_token_limit_and_waste_little(
    given_sequences: list[Sequence], tokens_max: int
) -> None:
    for part in microbatches(given_sequences, tokens_max=tokens_max):
        rows, length = part.token_ids.shape
        assert rows == 1 or rows * length <= tokens_max
        shortest = min(len(given_sequences[m].token_ids) for m in part.members)
        assert shortest >= 0.9 * length


def test_packing_does_not_change_a_log_probability(tiny: PolicyShape) -> None:
    policy = PolicyModel(tiny, seed=1)
    alone = sequence([False, True, True, False, True, True, True, True, True], 3)
    longer = sequence([True] * 10, 5)
    (part,) = microbatches([longer, alone], tokens_max=1000)
    packed, entropy = part.output_logprobs(policy)
    (single,) = microbatches([alone], tokens_max=1000)
    assert part.members == (1, 0)
    expected, _ = single.output_logprobs(policy)
    torch.testing.assert_close(packed[: len(expected)], expected, atol=1e-5, rtol=1e-5)
    assert bool((entropy > 0).all())
