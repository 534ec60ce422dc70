"""verifiers: trajectories of two turns through its training client and its evaluation client.

The training client renders and asks `/inference/v1/generate`; each trajectory has a session of
its own. The evaluation client relays chat completions.
"""

import asyncio

import verifiers
import verifiers.v1 as vf
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

from tests.clients.client_facts import JOB, MODEL, URL, Facts

TRAJECTORIES = 10
MAX_TOKENS = 12
DIALECT = ChatDialect()


async def trajectory(client: vf.Client, number: int, facts: Facts) -> None:
    """Two turns of one trace, which holds every sampled token at its end."""
    prompt = f"Count to {number}."
    trace = Trace(
        task=TraceTask(type="Count", data=vf.TaskData(idx=number, prompt=prompt)),
        agent=AgentInfo(config=vf.AgentConfig(model=JOB)),
    )
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=MAX_TOKENS)
    messages = [vf.UserMessage(content=prompt)]
    tokens = 0
    for _ in range(2):
        turn = prepare_turn(trace, messages)
        body = {"model": JOB, "messages": []}
        reply = await client.get_response(DIALECT, body, sampling, session_id=trace.id, turn=turn)
        assert reply.tokens is not None
        assert reply.finish_reason in ("stop", "length"), reply
        tokens += len(reply.tokens.completion_ids)
        facts.turn(reply.tokens.completion_ids, reply.tokens.completion_logprobs)
        turn.commit(reply)
        messages = [*messages, reply.message, vf.UserMessage(content="And on?")]
    sampled = sum(sum(node.mask) for node in trace.nodes if node.sampled)
    assert sampled == tokens, (sampled, tokens)


async def evaluated(client: vf.Client, facts: Facts) -> None:
    body = {
        "model": JOB,
        "messages": [{"role": "user", "content": "Name an engine."}],
        "max_tokens": MAX_TOKENS,
        "logprobs": True,
        "return_token_ids": True,
    }
    reply = await client.get_response(DIALECT, body, vf.SamplingConfig(), session_id="evaluation")
    assert reply.raw is not None
    (choice,) = reply.raw["choices"]
    content = choice["logprobs"]["content"]
    versions = [span["version"] for span in choice["spans"]]
    facts.turn(choice["token_ids"], [each["logprob"] for each in content], versions=versions)


async def main() -> None:
    facts = Facts()
    config = vf.TrainClientConfig(base_url=f"{URL}/v1", renderer_model_name=str(MODEL))
    training = vf.resolve_client(config)
    await asyncio.gather(*(trajectory(training, n, facts) for n in range(TRAJECTORIES)))
    evaluation = vf.resolve_client(vf.EvalClientConfig(base_url=f"{URL}/v1"))
    await evaluated(evaluation, facts)
    await training.close()
    await evaluation.close()
    facts.report(client=verifiers.__version__)


if __name__ == "__main__":
    asyncio.run(main())
