"""Samples a step's trajectories in this process: the job without engines or a gateway.

Turns of all trajectories advance together, which their fixed line length permits; tool latencies
are not waited for.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from examples.grpo.environment import LINE_TOKENS, Episode, Task
from examples.grpo.model import KvCache, PolicyModel
from examples.grpo.trajectory import OpenTrajectory, OutputToken, Trajectory
from examples.grpo.vocabulary import STOP_ID

ENGINE = "local"


class LocalSampler:
    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy

    @torch.no_grad()
    def sample(
        self, tasks: Sequence[Task], *, samples_per_prompt: int, version: int, seed: int
    ) -> list[Trajectory]:
        """Every task `samples_per_prompt` times, in order of prompt and sample."""
        generator = torch.Generator().manual_seed(seed)
        running = [
            (OpenTrajectory(task.prompt_index, sample, episode.prompt_ids), episode)
            for task in tasks
            for sample in range(samples_per_prompt)
            for episode in [Episode(task)]
        ]
        cache = KvCache([])
        finished: list[Trajectory] = []
        while running:
            fresh = torch.tensor([one.context[cache.tokens :] for one, _ in running])
            lines = self._lines(fresh, cache, version, generator)
            keep = []
            for row, ((one, episode), line) in enumerate(zip(running, lines, strict=True)):
                one.write(line)
                ended = one.observe(episode.act(tuple(token.token_id for token in line)))
                if ended is None:
                    keep.append(row)
                else:
                    finished.append(ended)
            running = [running[row] for row in keep]
            cache.keep_rows(torch.tensor(keep, dtype=torch.long))
        return sorted(finished, key=lambda one: (one.prompt_index, one.sample_index))

    def _lines(
        self, fresh: Tensor, cache: KvCache, version: int, generator: torch.Generator
    ) -> list[list[OutputToken]]:
        """One line per row after the `fresh` tokens, each cut at its stop token."""
        ids, logprobs = [], []
        for _ in range(LINE_TOKENS):
            hidden = self._policy(fresh, cache)[:, -1]
            each = self._policy.logprobs(hidden)
            fresh = torch.multinomial(each.exp(), 1, generator=generator)
            ids.append(fresh[:, 0])
            logprobs.append(each.gather(1, fresh)[:, 0])
        return [
            _until_stop(
                OutputToken(token_id, logprob, ENGINE, version)
                for token_id, logprob in zip(row_ids, row_logprobs, strict=True)
            )
            for row_ids, row_logprobs in zip(
                torch.stack(ids, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True
            )
        ]


def _until_stop(tokens: Iterable[OutputToken]) -> list[OutputToken]:
    line = []
    for token in tokens:
        line.append(token)
        if token.token_id == STOP_ID:
            break
    return line
