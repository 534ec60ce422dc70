"""ART: a model whose endpoint is the gateway; its trajectories, tokenised as it trains on them.

A rollout's choices are what ART's client returned, and ART's own preprocessing turns a group of
trajectories into ids, masks, advantages and log-probabilities.
"""

import asyncio
import importlib.metadata
import math
import os
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import art
from art.preprocessing.tokenize import tokenize_trajectory_groups
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples.grpo.vocabulary import write_tokenizer
from tests.clients.client_facts import JOB, URL, Facts

MAX_TOKENS = 16
WORDS = 1024
"""Twice the test model's vocabulary."""
QUESTIONS = ("What is a lease?", "Name an engine.", "Why is the gate closed?", "Count to four.")
GROUP = 3


async def rollout(model: art.Model, question: str, facts: Facts) -> art.Trajectory:
    """Two turns of one trajectory."""
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": question}])
    versions = set()
    for followup in ("Go on.", None):
        reply = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            max_tokens=MAX_TOKENS,
            logprobs=True,
            extra_body={"return_tokens_as_token_ids": True},
            extra_headers={"X-Session-ID": f"{question} {id(trajectory)}"},
        )
        (choice,) = reply.choices
        assert choice.finish_reason in ("stop", "length")
        assert choice.logprobs is not None
        told = choice.logprobs.content or []
        spans = choice.model_extra["weight_versions"] if choice.model_extra else []
        versions |= {int(span["version"]) for span in spans}
        ids = [int(each.token.removeprefix("token_id:")) for each in told]
        assert reply.usage is not None
        assert reply.usage.completion_tokens == len(ids)
        facts.turn(ids, [each.logprob for each in told], versions=versions)
        trajectory.messages_and_choices.append(choice)
        if followup is not None:
            trajectory.messages_and_choices.append({"role": "user", "content": followup})
    (trajectory.initial_policy_version, trajectory.final_policy_version) = (
        min(versions),
        max(versions),
    )
    trajectory.reward = sum(ids) / len(ids)
    return trajectory.finish()


def word_tokenizer() -> PreTrainedTokenizerBase:
    """Each id is one word. ART first puts the greatest unused id in each reply's place: the test
    model's byte pairs would merge it with the text beside it, and its sampled ids may be any."""
    folder = Path("art-tokenizer")
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, words=WORDS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    )
    return tokenizer


def sampled_ids(trajectory: art.Trajectory) -> list[int]:
    return [
        int(each.token.removeprefix("token_id:"))
        for choice in trajectory.messages_and_choices
        if not isinstance(choice, dict)
        for each in choice.logprobs.content
    ]


async def main() -> None:
    facts = Facts()
    model = art.Model(
        name="agent",
        project="rosemux",
        inference_base_url=f"{URL}/v1",
        inference_api_key="none",
        inference_model_name=JOB,
    )
    groups = await art.gather_trajectory_groups(
        art.TrajectoryGroup(rollout(model, question, facts) for _ in range(GROUP))
        for question in QUESTIONS
    )
    tokenized = list(
        tokenize_trajectory_groups(
            word_tokenizer(),
            groups,
            allow_training_without_logprobs=False,
            scale_rewards=True,
            drop_zero_advantage_trajectories=False,
        )
    )
    assert len(tokenized) == GROUP * len(QUESTIONS), len(tokenized)
    for each in tokenized:
        trained = [at for at, mask in enumerate(each.assistant_mask) if mask]
        assert [each.token_ids[at] for at in trained] == sampled_ids(each.trajectory)
        assert all(math.isfinite(each.logprobs[at]) for at in trained)
    facts.report(client=importlib.metadata.version("openpipe-art"), trajectories=len(tokenized))


if __name__ == "__main__":
    asyncio.run(main())
