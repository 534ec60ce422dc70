"""Repairs vLLM's state of thinking budgets; apart, as one file for each patched part of vLLM."""

from dataclasses import replace
from operator import attrgetter
from typing import Any


def replaying_output(holder: Any) -> None:
    """Thinking budgets in runner 1: output at a request's first step counts token by token, though
    quiet ones are skipped. vLLM would count it at once, and lose its place in a forced end."""
    update = holder._update_think_state
    markers = attrgetter("think_start_token_ids", "think_end_token_ids")

    def replayed(self: Any, state: dict[str, Any]) -> None:
        output, drafted, length = state["output_tok_ids"], state["spec_token_ids"], 0
        while length < len(output) and "rosemux_replayed" not in state:
            state |= {"output_tok_ids": output[:length], "spec_token_ids": []}
            update(self, state)
            spent = state["prev_output_length"] + state["check_count_down"]
            due = len(output) if state["start_thinking"] < 0 else min(spent, len(output))
            steps = range(length + 1, 0 if state["in_end"] else due)
            ends = (n for n in steps for m in markers(self) if output[n - len(m) : n] == m)
            length = next(ends, max(length + 1, steps.stop))
        state |= {"output_tok_ids": output, "spec_token_ids": drafted, "rosemux_replayed": True}
        update(self, state)

    holder._update_think_state = replayed


def kept_apart(holder: Any) -> None:
    """Moves the state of a row together with its request.

    vLLM 0.24 to 0.33 leave the state of an ended request in its row (vllm#49613 fixed swaps only).
    A request without a budget that moves into the row then gets the rest of the forced end as its
    own tokens, with a log-probability of 0.
    """
    sync_batch = holder.sync_batch

    def synced(self: Any, batch_update: Any) -> None:
        if not batch_update:
            return
        sync_batch(self, replace(batch_update, moved=()))
        states: dict[int, Any] = self._state
        for source, target, direction in batch_update.moved:
            moved, displaced = states.pop(source, None), states.pop(target, None)
            if moved is not None:
                states[target] = moved
            if displaced is not None and direction.name == "SWAP":
                states[source] = displaced

    holder.sync_batch = synced
