"""Short sampled turns with and without moves, in alternating blocks of one run.

In a `moved` block the job's right to its dedicated engines and the guest's lease are taken away by
turns, so that all open turns move each time. Both arms have the same prompts, stop tokens and
temperature. The arm counts, not whether a turn was moved: long turns are moved more often.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.migration import records, reference
from benchmarks.migration.bias import (
    LEAST_P,
    LOST_ENDS,
    POLICIES,
    Sample,
    interval,
    p_values,
    power,
)
from benchmarks.migration.deployment import Deployment
from benchmarks.migration.draws import DrawnToken, power_against_lost_ends, report
from benchmarks.migration.evidence import MoveEvidence
from benchmarks.migration.faults import evidence_of, verdict_on
from benchmarks.migration.records import AttemptRecord, RequestRecord
from benchmarks.migration.replies import Reply
from benchmarks.migration.rollout_plan import bias_plan
from benchmarks.migration.rollout_process import rolling_out
from benchmarks.migration.rollout_routes import JOB
from benchmarks.migration.verdict import CONVICTING

CALM, MOVED = "calm", "moved"
_PERIOD_S = 0.4
MOST_Z = 4.0
"""Beyond it a run convicts: a fair one in two of 1,000 runs, by eight z and the p-value."""
_LEAST_POWER = 0.8
"""A run that would miss a biased policy more often shows nothing."""


async def measured_bias(
    deployment: Deployment, model: Path, *, turns: int, blocks: int, seed: int
) -> dict[str, Any]:
    plan = bias_plan(seed, turns, blocks=blocks, arms=(CALM, MOVED))
    mover: asyncio.Task[None] | None = None
    began_s = deployment.clock.now()
    async with rolling_out(deployment, plan) as client:
        async for word, rest in client.lines():
            if word != "arm":
                continue
            if mover is not None:
                mover.cancel()
                with suppress(asyncio.CancelledError):
                    await mover
                mover = None
            if rest.startswith(MOVED):
                mover = asyncio.create_task(_move_all(deployment))
    took_s = deployment.clock.now() - began_s
    if mover is not None:
        mover.cancel()
        with suppress(asyncio.CancelledError):
            await mover
    samples = _samples(
        records.read(deployment.record, RequestRecord),
        records.read(deployment.attempts, AttemptRecord),
    )
    names = {each.name for each in plan}
    evidence = evidence_of(deployment, model, names, poison=frozenset())
    found = judged_bias(samples, seed=seed)
    draws = {arm: report(drawn(evidence, arm)) for arm in (CALM, MOVED)}
    # A loss of ends is what `ends_z` is for; lengths alone show a large one only.
    caught = power_against_lost_ends(draws[MOVED], share=LOST_ENDS, most_z=MOST_Z)
    found["power_of_draws"] = {"losing_ends": caught}
    draws |= {
        part: report(tokens)
        for part, tokens in at_moves(evidence, model, deployment.states).items()
    }
    found["draws"] = {part: asdict(each) for part, each in draws.items()}
    verdict = verdict_on(evidence, deployment, model)
    return found | {"took_s": took_s, "seed": seed, "verdict": verdict}


async def _move_all(deployment: Deployment) -> None:
    """Takes dedicated engines and the lease away by turns; leaves both in place."""
    try:
        while True:
            await _allow(deployment, dedicated=False)
            await asyncio.sleep(_PERIOD_S)
            await _allow(deployment, dedicated=True)
            deployment.kill_switch.write_text("drain\n")
            await asyncio.sleep(_PERIOD_S / 2)
            deployment.kill_switch.unlink(missing_ok=True)
            await asyncio.sleep(_PERIOD_S)
    finally:
        deployment.kill_switch.unlink(missing_ok=True)
        await _allow(deployment, dedicated=True)


async def _allow(deployment: Deployment, *, dedicated: bool) -> None:
    await deployment.post(f"/v1/jobs/{JOB}/dedicated", {"enabled": dedicated})


def _samples(
    requests: Iterable[RequestRecord], attempts: Iterable[AttemptRecord]
) -> dict[str, list[Sample]]:
    """The samples of each arm, in the order of the pairs."""
    found: dict[str, dict[str, Sample]] = {CALM: {}, MOVED: {}}
    for request in requests:
        arm, _, pair = request.trajectory.partition("-")
        reply = Reply.of(request)
        if arm in found and reply.finish_reasons[-1:] in (["stop"], ["length"]):
            found[arm][pair] = Sample.of(pair, reply.token_ids)
    for attempt in attempts:
        arm, _, rest = attempt.request_id.partition("-")
        pair = rest.rpartition("-")[0]
        if attempt.number > 1 and arm in found and pair in found[arm]:
            sample = found[arm][pair]
            found[arm][pair] = replace(sample, moves=sample.moves + 1)
    return {arm: [own[pair] for pair in sorted(own)] for arm, own in found.items()}


def drawn(evidence: MoveEvidence, arm: str) -> Iterator[DrawnToken]:
    """Tokens of the arm's answered turns, rated by the weights of their versions."""
    for record in evidence.requests:
        claim = reference.ClaimedTurn.of(record)
        if claim is None or record.trajectory.partition("-")[0] != arm:
            continue
        truths = evidence.truths.get(record.request_id, ())
        for token_id, truth in zip(claim.token_ids, truths, strict=False):
            yield DrawnToken(truth, token_id in claim.ends)


def at_moves(
    evidence: MoveEvidence, model: Path, weights: Mapping[int, Mapping[str, Any]]
) -> dict[str, list[DrawnToken]]:
    """Tokens that a move threw away, and the first one of each attempt that went on: a move can
    bias lengths through these alone. `weights` are those of one published version.

    Thrown away are those behind the next attempt's context, whatever was drawn in their place.
    """
    (version,) = weights
    prompts = {each.request_id: len(each.body["token_ids"]) for each in evidence.requests}
    attempts: dict[str, list[AttemptRecord]] = defaultdict(list)
    for attempt in evidence.attempts:
        if attempt.token_ids and attempt.request_id in prompts:
            attempts[attempt.request_id].append(attempt)
    claims, taken = {}, {}
    for name, own in attempts.items():
        own.sort(key=lambda each: each.began_s)
        for attempt, after in zip(own, [*own[1:], None], strict=True):
            key = f"{name} {attempt.number}"
            made = len(attempt.token_ids)
            taken[key] = len(after.context) - len(attempt.context) if after else made
            if taken[key] < made or len(attempt.context) > prompts[name]:
                claims[key] = reference.ClaimedTurn(
                    key, attempt.context, attempt.token_ids, [version] * made, attempt.sampling
                )
    found: dict[str, list[DrawnToken]] = {"thrown_away": [], "first_behind_a_move": []}
    for key, truths in reference.truths_of(model, weights, claims.values()).items():
        claim = claims[key]
        tokens = [
            DrawnToken(truth, token_id in claim.ends)
            for token_id, truth in zip(claim.token_ids, truths, strict=True)
        ]
        found["thrown_away"] += tokens[max(0, taken[key]) :]
        if len(claim.prompt) > prompts[key.rpartition(" ")[0]]:
            found["first_behind_a_move"].append(tokens[0])
    return found


def bias_faults(found: Mapping[str, Any]) -> dict[str, Any]:
    """Reasons for which a run convicts, or shows nothing."""
    faults = {name: found["verdict"][name] for name in CONVICTING if found["verdict"][name]}
    if found["bias_p_value"] < LEAST_P:
        faults["bias_p_value"] = found["bias_p_value"]
    for part, draws in found["draws"].items():
        worst = max(abs(draws["ends_z"]), abs(draws["logprob_z"]))
        if worst > MOST_Z:
            faults[f"draws of {part}"] = worst
    if not found["moved_turns"][MOVED]:
        faults["moved_turns"] = 0
    either = {
        policy: max(caught, found["power_of_draws"].get(policy, 0.0))
        for policy, caught in found["power_against"].items()
    }
    weak = {policy: caught for policy, caught in either.items() if caught < _LEAST_POWER}
    if weak:
        faults["power_against"] = weak
    return faults


def judged_bias(
    samples: Mapping[str, Sequence[Sample]], *, seed: int, power_rounds: int = 40
) -> dict[str, Any]:
    calm, moved = samples[CALM], samples[MOVED]
    found = p_values(calm, moved, seed=seed)
    return {
        "bias_p_value": found.pop("bias"),
        "p_values": found,
        "turns": {arm: len(own) for arm, own in samples.items()},
        "moved_turns": {arm: sum(one.moves > 0 for one in own) for arm, own in samples.items()},
        "mean_length": {arm: _mean([one.length for one in own]) for arm, own in samples.items()},
        "length_moved_less_calm": asdict(interval(calm, moved)),
        "mean_reward": {arm: _mean([one.reward for one in own]) for arm, own in samples.items()},
        "power_against": {
            policy: power(calm, moved, policy=policy, seed=seed, rounds=power_rounds)
            for policy in POLICIES
        },
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
