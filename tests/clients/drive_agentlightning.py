"""Agent Lightning: its API gateway and its local controller, both as its own commands, before ours.

Agents are processes of the controller and know the URL of Agent Lightning alone. Its rollout
manager registers our gateway as the model's endpoint, and reads what its trainer would train on.
"""

import asyncio
import importlib.metadata
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
from agentlightning.client import AgentLightningAsyncClient
from agentlightning.schemas import RolloutState
from agentlightning.verl.agl_rollout_manager import AglRolloutManager, CompletedRollout

from tests.clients.client_facts import JOB, URL, Facts

MAX_TOKENS = 96
"""Long enough that turns of processes that start apart overlap: two fit the dedicated engine."""
TURNS = 2
ROLLOUTS = 2
"""Rollouts of each question."""
QUESTIONS = ("What is a lease?", "Name an engine.", "Why is the gate closed?", "Count to four.")
START_S = 60.0
REWARD = 0.5


class Agent:
    """Two turns of a chat, then its reward. The controller starts a process for each rollout."""

    def run(self) -> None:
        client = openai.OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key="none")
        messages = [{"role": "user", "content": os.environ["QUESTION"]}]
        for _ in range(TURNS):
            reply = client.chat.completions.create(
                model="any", messages=messages, max_tokens=MAX_TOKENS
            )
            content = reply.choices[0].message.content
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": "On."},
            ]
        body = {"event_type": "reward", "data": {"value": REWARD}}
        httpx.post(os.environ["AGL_EVENT_URL"], json=body).raise_for_status()


@contextmanager
def command(module: str, *settings: str) -> Iterator[None]:
    """One of Agent Lightning's own processes."""
    process = subprocess.Popen([sys.executable, "-m", module, *settings], stdout=sys.stderr)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


async def until_it_answers(url: str) -> None:
    async with AgentLightningAsyncClient(base_url=url) as client, asyncio.timeout(START_S):
        while True:
            try:
                (await client.get("/healthz")).raise_for_status()
                return
            except httpx.TransportError:
                await asyncio.sleep(0.2)


def roll_out(url: str) -> list[CompletedRollout]:
    manager = AglRolloutManager(
        agl_base_url=url,
        agl_key="",
        model=JOB,
        step=0,
        train_rollout_n=ROLLOUTS,
        poll_interval_seconds=0.5,
        local_agent_class="tests.clients.drive_agentlightning:Agent",
        local_env_map={"QUESTION": "input.question"},
    )
    manager.register_model([f"{URL}/v1"])
    return manager.enqueue_and_wait_until_completed({"question": [*QUESTIONS]}, is_train=True)


def check(rollout: CompletedRollout, facts: Facts) -> None:
    assert rollout.rollout_state is RolloutState.SUCCEEDED, rollout
    assert rollout.final_reward == REWARD
    assert rollout.triplets is not None
    assert len(rollout.triplets) == TURNS, rollout
    requests = [each["data"] for each in rollout.events if each["event_type"] == "model_request"]
    for turn, request in zip(rollout.triplets, requests, strict=True):
        (choice,) = request["response"]["choices"]
        assert turn.prompt["token_ids"], "no ids of the prompt"
        facts.turn(
            turn.response["token_ids"],
            turn.response["log_probs"],
            versions=[span["version"] for span in choice["weight_versions"]],
        )


def main() -> None:
    facts = Facts()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    serving = ("host=127.0.0.1", f"port={port}", f"default_proxy.model_name={JOB}")
    running = ("runner_type=local", f"agl_server.url={url}", "local_runner.poll_interval=0.5")
    with command("agentlightning.server", *serving):
        asyncio.run(until_it_answers(url))
        with command("agentlightning.controller", *running):
            rollouts = roll_out(url)
    assert len(rollouts) == ROLLOUTS * len(QUESTIONS)
    for rollout in rollouts:
        check(rollout, facts)
    facts.report(client=importlib.metadata.version("agentlightning"), rollouts=len(rollouts))


if __name__ == "__main__":
    main()
