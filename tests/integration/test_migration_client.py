"""The client of benchmarks.migration, in its process, with a real gateway and fake engines."""

import asyncio
import sys
from pathlib import Path

import msgspec

from benchmarks.migration import records
from benchmarks.migration.faults import RolloutProcess
from benchmarks.migration.judge import Evidence, TokenTruth, judged
from benchmarks.migration.model import VOCABULARY as PLANNED_VOCABULARY
from benchmarks.migration.records import Reply, RequestRecord
from benchmarks.migration.rollout_plan import rollout_plan
from tests.integration.fake_engine import VOCABULARY, FakeEngine, next_token
from tests.integration.gateway_in_process import gateway_on

TRAJECTORIES = 20


def truth(record: RequestRecord) -> list[TokenTruth]:
    """The fake engine's rating of each token at version 1."""
    context, found = list(record.body["token_ids"]), []
    for token in Reply.of(record).token_ids:
        best = next_token(context, 1)
        found.append(TokenTruth(-token / VOCABULARY, 0.0 if token == best else 1.0))
        context.append(token)
    return found


async def test_a_client_that_is_held_comes_to_rest_and_all_its_turns_are_whole(
    tmp_path: Path,
) -> None:
    engines = [FakeEngine(step_s=0.005, epoch=None) for _ in range(2)]
    for engine in engines:
        engine.vocabulary = PLANNED_VOCABULARY
    plan = [one for one in rollout_plan(0, TRAJECTORIES, contexts=(256, 512)) if not one.poison]
    # Sent again while it runs: the client joins its own turn.
    twice = msgspec.structs.replace(plan[0].turns[0], breaks_off_after_s=0.001)
    plan[0] = msgspec.structs.replace(plan[0], turns=[twice])
    file, record = tmp_path / "plan.json", tmp_path / "requests.jsonl"
    file.write_bytes(msgspec.json.encode(plan))
    async with gateway_on(*engines) as gateway:
        assert (await gateway.publish(1))[0] == 200
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.migration.rollout_client"),
            *("--gateway", gateway.url, "--plan", str(file), "--record", str(record)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        client, ended = RolloutProcess(process), 0
        async with asyncio.timeout(60.0):
            async for word, rest in client.lines():
                if word == "ended":
                    ended = int(rest)
                    if ended == TRAJECTORIES // 4:
                        await client.hold()
                if word == "idle":
                    assert [engine.open for engine in engines] == [0, 0]
                    await client.release()
    assert ended == TRAJECTORIES
    requests = list(records.read(record, RequestRecord))
    assert [one.broken_off for one in requests if one.trajectory == plan[0].name] == [True, False]
    answered = {one.request_id: one for one in requests}
    verdict = judged(
        Evidence(
            requests=requests,
            attempts=[],
            held=[],
            hashes={},
            truths={name: truth(one) for name, one in answered.items()},
            ends=frozenset(),
        )
    )
    assert verdict.trajectories == TRAJECTORIES
    assert verdict.judged_tokens == verdict.tokens > 0
    assert (verdict.lost, verdict.truncated_by_place, verdict.overrun) == (0, 0, 0)
    assert verdict.wrong_span == 0
