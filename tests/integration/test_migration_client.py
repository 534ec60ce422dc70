"""The client of benchmarks.migration, in its process, with a real gateway and fake engines."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.migration import records
from benchmarks.migration.chat_plan import Chat
from benchmarks.migration.evidence import MoveEvidence, TokenTruth
from benchmarks.migration.judge import judged
from benchmarks.migration.model import VOCABULARY as PLANNED_VOCABULARY
from benchmarks.migration.pin_judge import Announcement
from benchmarks.migration.records import RequestRecord
from benchmarks.migration.replies import Reply, replies
from benchmarks.migration.rollout_plan import PlannedTrajectory, PlannedTurn, rollout_plan
from benchmarks.migration.rollout_process import RolloutProcess
from benchmarks.migration.rollout_routes import RolloutRoute
from tests.integration.fake_engine import VOCABULARY, FakeEngine, next_token
from tests.integration.fake_renderer import FakeRenderer, text_of
from tests.integration.gateway_in_process import Site, gateway_on

TRAJECTORIES = 20


def ids_of(chat: Chat) -> list[int]:
    """As the fake renderer has it, which knows no template."""
    return [ord(c) % 256 for message in chat.messages for c in message["content"]]


def settings(record: RequestRecord) -> dict[str, Any]:
    found: dict[str, Any] = record.body["sampling_params"]
    return found


def truth(record: RequestRecord, index: int) -> list[TokenTruth]:
    """The fake engine's rating of each token at version 1."""
    context, found = list(record.body["token_ids"]), []
    for token in Reply.of(record, index).token_ids:
        best = next_token(context, 1)
        found.append(TokenTruth(-token / VOCABULARY, 0.0 if token == best else 1.0))
        context.append(token)
    return found


def told_by_no_tap(record: RequestRecord) -> RequestRecord:
    """With the spans that taps would have seen, if its route tells none."""
    if record.route is not RolloutRoute.TINKER:
        return record
    spans = {
        index: [{"start": 0, "end": len(reply.token_ids), "engine": "e0", "version": 1}]
        for index, reply in replies(record).items()
    }
    return msgspec.structs.replace(record, tap_spans=spans)


def whole_plan() -> list[PlannedTrajectory]:
    """No request kills its engine, and the first one is sent again while it runs: the client joins
    its own turn."""
    drawn = rollout_plan(0, TRAJECTORIES, contexts=(256, 512), chat=ids_of)
    plan = [one for one in drawn if not one.poison]
    twice = PlannedTurn(
        new_tokens=[1, 20, 21],
        sampling={"max_tokens": 60, "logprobs": 1},
        breaks_off_after_s=0.001,
    )
    plan[0] = msgspec.structs.replace(plan[0], turns=[twice])
    return plan


async def rolled_out(url: str, plan: Path, record: Path, engines: Sequence[FakeEngine]) -> int:
    """Runs the client, and holds it once meanwhile; returns the number of its trajectories."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.migration.rollout_client"),
        *("--gateway", url, "--plan", str(plan), "--record", str(record)),
        *("--store", str(plan.parent)),
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
    return ended


async def test_a_client_that_is_held_comes_to_rest_and_all_its_turns_are_whole(
    tmp_path: Path,
) -> None:
    engines = [FakeEngine(step_s=0.005, epoch=None) for _ in range(2)]
    for engine in engines:
        engine.vocabulary = PLANNED_VOCABULARY
    plan = whole_plan()
    file, record = tmp_path / "plan.json", tmp_path / "requests.jsonl"
    file.write_bytes(msgspec.json.encode(plan))
    (tmp_path / "LATEST").write_text("weight_v000001")
    renderer = Site()
    await renderer.serve(FakeRenderer().app())
    async with gateway_on(*engines, renderers=[renderer.url]) as gateway:
        assert (await gateway.publish(1))[0] == 200
        ended = await rolled_out(gateway.url, file, record, engines)
    await renderer.close()
    assert ended == TRAJECTORIES
    requests = list(records.read(record, RequestRecord))
    assert [one.broken_off for one in requests if one.trajectory == plan[0].name] == [True, False]
    requests = [told_by_no_tap(one) for one in requests]
    answered = {one.request_id: one for one in requests}
    verdict = judged(
        MoveEvidence(
            requests=requests,
            attempts=[],
            held=[],
            hashes={},
            truths={
                one.choice_name(index): truth(one, index)
                for one in answered.values()
                for index in range(one.samples)
            },
            announced={1: Announcement(0.0, 0.0)},
            ends=frozenset(),
            text=text_of,
            parses_chats=False,
        )
    )
    assert verdict.trajectories == TRAJECTORIES
    assert verdict.judged_tokens == verdict.tokens > 0
    assert (verdict.lost, verdict.truncated_by_place, verdict.overrun) == (0, 0, 0)
    assert (verdict.wrong_span, verdict.pin_broken) == (0, 0)
    # The fake engine knows no grammar.
    grammars = [one for one in answered.values() if "structured_outputs" in settings(one)]
    assert verdict.broken_setting == sum(one.samples for one in grammars)
    assert verdict.routes.keys() == {route.label for route in RolloutRoute}
    assert verdict.pins["exact"] > 0
    assert verdict.samples > 0
    assert verdict.judged_texts > 0
