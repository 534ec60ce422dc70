"""A trainer that speaks vLLM's own weight-sync client publishes to a whole fleet."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


async def trained(url: str, store: Path) -> dict[str, Any]:
    """The trainer process's report."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.weight_sync_trainer",
        url,
        str(store),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-4000:]
    seen: dict[str, Any] = json.loads(said.splitlines()[-1])
    return seen


@pytest.mark.engine
async def test_a_trainer_with_vllms_own_classes_publishes_to_every_engine(
    fake_engine, gateway, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    engines = [fake_engine(), fake_engine()]
    service = gateway(*engines)
    seen = await trained(f"{service.url}/v1/jobs/job/vllm", tmp_path / "job.store")
    assert len(set(seen["hashes"])) == 2
    assert "not through a process group" in seen["refusal"]
    for engine in engines:
        looked = await engine.get("/_fake")
        newest = {"store": "job.store", "version": 2, "state_hash": seen["hashes"][-1]}
        assert looked["updated"] == newest
    status = await service.get("/v1/status")
    assert {engine["version"] for engine in status["engines"].values()} == {2}


async def test_an_unsupported_call_to_a_fleet_is_refused_and_changes_nothing(
    fake_engine, gateway
) -> None:
    engine = fake_engine()
    service = gateway(engine)
    routes = "/v1/jobs/job/vllm"
    for path, body, why in (
        ("update_weights", {"update_info": {"store": "../etc", "version": 1}}, "store"),
        (
            "update_weights",
            {"update_info": {"store": "job.store", "version": 0}},
            "update_info.version",
        ),
        ("update_weights", {"update_info": {"names": ["w"], "dtype_names": []}}, "update_info"),
        ("update_weights", {"update_info": [{"store": "job.store", "version": 1}]}, "update_info"),
        ("finish_weight_update", {"weight_version": "1"}, "without an update_weights"),
        ("init_weight_transfer_engine", {"init_info": {"master_port": 1}}, "init_info"),
    ):
        status, reply = await service.post(f"{routes}/{path}", body)
        assert status == 400
        assert why in reply["error"]
    status, _ = await service.post("/v1/jobs/stranger/vllm/start_weight_update", {})
    assert status == 400
    assert (await engine.get("/_fake"))["updated"] is None


async def test_the_fleet_looks_like_one_server(fake_engine, gateway) -> None:
    service = gateway(fake_engine())
    routes = "/v1/jobs/job/vllm"
    assert await service.get(f"{routes}/get_world_size") == {"world_size": 1}
    for path in ("pause?mode=keep", "start_weight_update", "resume"):
        assert (await service.post(f"{routes}/{path}", {}))[0] == 200
    update = {"update_info": {"store": "job.store", "version": 3}}
    assert (await service.post(f"{routes}/update_weights", update))[0] == 200
    status, reply = await service.post(f"{routes}/finish_weight_update", {"weight_version": "4"})
    assert (status, reply["error"]) == (400, "weight_version '4': the update was to 3")
