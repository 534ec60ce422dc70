"""vLLM's own state of a thinking budget, without an engine: output that a request brings counts,
and a request without a budget has none."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.vllm.thinking_budgets import kept_apart, replaying_output

pytestmark = pytest.mark.engine

LAST_TOKEN = 7
TOKENS = st.integers(0, LAST_TOKEN)
MARKERS = st.sampled_from([[6], [6, 0], [6, 0, 1], [0, 1, 0], [6, 6, 1]])
STARTS = st.sampled_from([[7], [7, 0]])


@pytest.fixture(scope="module")
def holder_class() -> type[Any]:
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    class Holder(ThinkingBudgetStateHolder):  # type: ignore[misc]
        """A class of its own, so that the wrap ends with the module."""

    replaying_output(Holder)
    return Holder


def sampled(
    holder_class: type[Any],
    *,
    start: list[int],
    end: list[int],
    budget: int,
    prompt: list[int],
    script: list[int],
    brought: list[int],
) -> list[int]:
    """Output of a model that would say `script`, under vLLM's budget, from `brought` on."""
    import torch

    config = SimpleNamespace(
        reasoning_start_token_ids=start,
        reasoning_end_token_ids=end,
        natural_reasoning_end_token_ids=end,
    )
    holder = holder_class(config, 1, 0, torch.device("cpu"), False)
    output = list(brought)
    params = SimpleNamespace(thinking_token_budget=budget)
    added = [(0, params, prompt, output)]
    holder.sync_batch(SimpleNamespace(removed=[], added=added, moved=[]))
    while len(output) < len(script):
        holder.update_state([list(output)], None)
        logits = torch.zeros(1, LAST_TOKEN + 1)
        logits[0, script[len(output)]] = 5.0
        output.append(int(holder.apply_to_logits(logits, False, []).argmax()))
    return output


@settings(max_examples=400, deadline=None)
@given(
    start=STARTS,
    end=MARKERS,
    budget=st.integers(-1, 9),
    prompt=st.lists(TOKENS, max_size=6),
    thinks=st.booleans(),
    script=st.lists(TOKENS, min_size=2, max_size=24),
)
def test_a_budget_forces_the_same_tokens_after_a_move_at_any_token(
    holder_class: type[Any],
    start: list[int],
    end: list[int],
    budget: int,
    prompt: list[int],
    thinks: bool,
    script: list[int],
) -> None:
    given_turn = {
        "start": start,
        "end": end,
        "budget": budget,
        "prompt": prompt + start * thinks,
        "script": script,
    }
    unmoved = sampled(holder_class, brought=[], **given_turn)  # type: ignore[arg-type]
    for cut in range(1, len(script)):
        moved = sampled(holder_class, brought=unmoved[:cut], **given_turn)  # type: ignore[arg-type]
        assert moved == unmoved, cut


def test_a_long_output_is_counted_in_few_steps() -> None:
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    class Counting(ThinkingBudgetStateHolder):  # type: ignore[misc]
        updates = 0

        def _update_think_state(self, state: dict[str, Any]) -> None:
            Counting.updates += 1
            super()._update_think_state(state)

    replaying_output(Counting)
    output = [1] * 20_000
    going_on = sampled(
        Counting, start=[7], end=[6, 0], budget=20_000, prompt=[7], script=[1] * 20_002,
        brought=output,
    )  # fmt: skip
    assert going_on[-2:] == [6, 0]
    assert Counting.updates < 10


ROWS = 4


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_budget_stays_with_its_request_when_rows_move(data: st.DataObject) -> None:
    """Rows of a batch as vLLM's own builder reports them: removed, filled anew, moved, swapped."""
    import torch
    from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    class Holder(ThinkingBudgetStateHolder):  # type: ignore[misc]
        """A class of its own."""

    kept_apart(Holder)
    holder = Holder(
        SimpleNamespace(reasoning_start_token_ids=[7], reasoning_end_token_ids=[6, 0]),
        ROWS, 0, torch.device("cpu"), False,
    )  # fmt: skip
    rows: dict[int, tuple[int, bool]] = {}
    names = iter(range(10_000))
    for _ in range(8):
        removed = data.draw(st.sets(st.sampled_from(sorted(rows)))) if rows else set()
        for row in removed:
            del rows[row]
        empty, added = sorted(set(range(ROWS)) - rows.keys()), []
        for row in empty[: data.draw(st.integers(0, len(empty)))]:
            name, budgeted = next(names), data.draw(st.booleans())
            rows[row] = (name, budgeted)
            params = SimpleNamespace(thinking_token_budget=0 if budgeted else None)
            added.append((row, params, [name, 7], []))
            removed.discard(row)
        moved = []
        while rows and (gap := min(set(range(ROWS + 1)) - rows.keys())) < max(rows):
            # As InputBatch.condense: the row that it fills is no longer reported as removed.
            moved.append((max(rows), gap, MoveDirectionality.UNIDIRECTIONAL))
            removed.discard(gap)
            rows[gap] = rows.pop(max(rows))
        if len(rows) > 1 and data.draw(st.booleans()):
            one, other = data.draw(st.permutations(sorted(rows)))[:2]
            moved.append((one, other, MoveDirectionality.SWAP))
            rows[one], rows[other] = rows[other], rows[one]
        holder.sync_batch(BatchUpdate(len(rows), sorted(removed), added, moved))
        states = {row: state["prompt_tok_ids"][0] for row, state in holder._state.items()}
        assert states == {row: name for row, (name, budgeted) in rows.items() if budgeted}
