"""OpenAI's own client and SGLang's route at one gateway over fake engines."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from scheduler.gateway.dialects.text_routes import RENDERER_ROUTES
from tests.integration.fake_engine import VOCABULARY, FakeEngine
from tests.integration.fake_renderer import (
    FakeRenderer,
    text_of,
)
from tests.integration.gateway_in_process import GatewayInProcess, Site, continued, gateway_on


@asynccontextmanager
async def served(
    eos: Sequence[int] = (), fake: FakeRenderer | None = None
) -> AsyncIterator[tuple[GatewayInProcess, openai.AsyncOpenAI]]:
    renderer = Site()
    await renderer.serve((fake or FakeRenderer()).app())
    engines = [FakeEngine(step_s=0.001, epoch=None) for _ in range(2)]
    for engine in engines:
        engine.eos = list(eos)
    try:
        async with gateway_on(*engines, renderers=[renderer.url]) as gateway:
            client = openai.AsyncOpenAI(
                base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=10
            )
            async with client:
                yield gateway, client
    finally:
        await renderer.close()


HELLO = [{"role": "user", "content": "hello"}]
IDS = [ord(c) for c in "hello"]
NO_RENDERER = {"renderers": ["http://127.0.0.1:9"], "timeouts": {"queue_s": 0.5}}


async def test_chat_gives_text_ids_and_spans_of_every_sample() -> None:
    async with served() as (_, client):
        reply = await client.chat.completions.create(
            model="job", messages=HELLO, max_tokens=6, n=3, extra_body={"return_token_ids": True}
        )
    told = reply.model_dump()
    wanted = continued(IDS, 6, version=0)
    assert [choice["message"]["content"] for choice in told["choices"]] == [text_of(wanted)] * 3
    assert [choice["token_ids"] for choice in told["choices"]] == [wanted] * 3
    assert told["prompt_token_ids"] == IDS
    assert all(choice["spans"][0]["version"] == 0 for choice in told["choices"])
    assert told["choices"][0]["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert (told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]) == (5, 18)


async def test_completions_answer_prompts_and_samples_in_order() -> None:
    async with served() as (_, client):
        reply = await client.completions.create(
            model="job", prompt=["hello", "world"], max_tokens=4, n=2
        )
    wanted = [
        text_of(continued([ord(c) for c in each], 4, version=0)) for each in ("hello", "world")
    ]
    assert [choice.text for choice in reply.choices] == [wanted[0]] * 2 + [wanted[1]] * 2
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]


async def test_a_stream_carries_the_same_text_and_ends_with_usage() -> None:
    text, ends, usage, created = "", [], None, set()
    async with served() as (_, client):
        chunks = await client.chat.completions.create(
            model="job",
            messages=HELLO,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in chunks:
            created.add(chunk.created)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
            usage = chunk.usage or usage
    assert text == text_of(continued(IDS, 9, version=0))
    assert ends == ["length"]
    assert created == {1}
    assert usage is not None
    assert usage.completion_tokens == 9


async def test_faults_have_openai_s_form_whoever_finds_them() -> None:
    async with served() as (_, client):
        with pytest.raises(openai.NotFoundError, match="is not what job job trains"):
            await client.chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="must be non-negative"):
            await client.chat.completions.create(model="job", messages=HELLO, temperature=-1)
        models = [model.id async for model in client.models.list()]
        contexts = [model.model_dump()["max_model_len"] async for model in client.models.list()]
    assert "job" in models
    assert contexts == [FakeEngine(step_s=0.0, epoch=None).context] * len(models)


async def test_a_request_without_a_renderer_says_what_is_missing() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with gateway_on(engine, **NO_RENDERER) as gateway:
        status, told = await gateway.post("/v1/chat/completions", {"messages": HELLO})
    assert status == 503
    assert "cannot be rendered" in told["error"]["message"]


async def test_sglang_s_clients_get_ids_in_its_form() -> None:
    async with served() as (gateway, _):
        body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 5}, "return_logprob": True}
        status, told = await gateway.post("/generate", body)
        many, listed = await gateway.post(
            "/generate", {"text": ["hello", "world"], "sampling_params": {"max_new_tokens": 3}}
        )
        refused, why = await gateway.post("/generate", {"input_ids": IDS, "image_data": ["x"]})
        for wrong in (
            {"top_logprobs_num": "x"},
            {"rid": ["a"]},
            {"sampling_params": []},
            {"text": 5},
        ):
            assert (await gateway.post("/generate", {"input_ids": IDS} | wrong))[0] == 400
        two = {"sampling_params": {"regex": "a+", "json_schema": "{}"}}
        _, second = await gateway.post("/generate", {"input_ids": IDS} | two)
    wanted = continued(IDS, 5, version=0)
    assert (status, told["output_ids"]) == (200, wanted)
    assert told["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert [entry[1] for entry in told["meta_info"]["output_token_logprobs"]] == wanted
    assert told["meta_info"]["weight_version"] == "0"
    assert many == 200
    assert [each["text"] for each in listed] == [
        text_of(continued([ord(c) for c in each], 3, version=0)) for each in ("hello", "world")
    ]
    assert refused == 400
    assert why["error"] == "image_data: media is not routed; send text"
    assert "json_schema: send one of regex, json_schema" in str(second)


async def test_sglang_s_clients_that_send_ids_get_the_text_that_they_grade() -> None:
    """slime and miles send `input_ids` and reward `text`."""
    fake = FakeRenderer()
    made = continued(IDS, 5, version=0)
    many = [[*IDS, place] for place in range(64)]
    async with served(fake=fake) as (gateway, _):
        body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 5}, "return_logprob": True}
        _, whole = await gateway.post("/generate", body)
        sampling = {"max_new_tokens": 5, "stop_token_ids": [made[2]]}
        _, cut = await gateway.post("/generate", {"input_ids": IDS, "sampling_params": sampling})
        sampling["no_stop_trim"] = True
        _, kept = await gateway.post("/generate", {"input_ids": IDS, "sampling_params": sampling})
        fake.derendered = 0
        sampling = {"max_new_tokens": 3}
        _, listed = await gateway.post(
            "/generate", {"input_ids": many, "sampling_params": sampling}
        )
        calls = fake.derendered
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{gateway.url}/generate",
                # SGLang's own default, with which no prompt is scored.
                json=body | {"stream": True, "logprob_start_len": -1},
            ) as response,
        ):
            events = (await response.text()).strip().split("\n\n")
    assert (whole["text"], whole["output_ids"]) == (text_of(made), made)
    assert (cut["text"], cut["output_ids"]) == (text_of(made[:2]), made[:3])
    assert (kept["text"], kept["output_ids"]) == (text_of(made[:3]), made[:3])
    wanted = [text_of(continued(each, 3, version=0)) for each in many]
    assert [each["text"] for each in listed] == wanted
    assert calls == 1, "one call for the texts of a request"
    last = json.loads(events[-2].removeprefix("data: "))
    assert (last["text"], last["output_ids"]) == (text_of(made), made)


async def test_miles_gets_what_its_rollout_reads_of_a_reply() -> None:
    """The request of miles 02aa8e78, generate_endpoint_utils.py, with a job of an adapter."""
    body = {
        "input_ids": IDS,
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": True,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "max_new_tokens": 5,
        },
        "return_logprob": True,
        "return_routed_experts": False,
        "return_indexer_topk": False,
        "lora_path": "job",
        "extra_key": "tenant-a",
    }
    async with served() as (gateway, _):
        status, told = await gateway.post("/generate", body)
        refused = await gateway.post("/generate", body | {"lora_path": "another"})
    made = continued(IDS, 5, version=0)
    assert (status, told["text"]) == (200, text_of(made))
    assert [entry[1] for entry in told["meta_info"]["output_token_logprobs"]] == made
    assert told["meta_info"]["finish_reason"]["type"] == "length"
    assert (refused[0], "another" in refused[1]["error"]) == (404, True)


@pytest.mark.parametrize("count", [1, 3])
async def test_sglang_s_top_log_probabilities_are_the_likeliest_tokens(count: int) -> None:
    body = {"input_ids": IDS, "return_logprob": True, "sampling_params": {"max_new_tokens": 4}}
    async with served() as (gateway, _):
        status, told = await gateway.post("/generate", body | {"top_logprobs_num": count})
        refused, why = await gateway.post("/generate", body | {"top_logprobs_num": 20})
    likeliest = [[-token / VOCABULARY, token, None] for token in range(count)]
    assert (status, told["meta_info"]["output_top_logprobs"]) == (200, [likeliest] * 4)
    assert refused == 400
    assert "top_logprobs_num: send one number, at most 19" in why["error"]


async def test_a_prompt_is_scored_for_miles_and_nothing_is_made() -> None:
    """The request of miles 06180588, prefill_logprobs.py."""
    many = [IDS, [*IDS[:-1], 7]]
    body = {
        "input_ids": many,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 2,
    }
    async with served() as (gateway, _):
        await gateway.publish(3)
        status, told = await gateway.post("/generate", body)
        _, both = await gateway.post(
            "/generate",
            body
            | {"input_ids": IDS, "logprob_start_len": 0, "top_logprobs_num": 2}
            | {"sampling_params": {"max_new_tokens": 3, "n": 2}},
        )
        wrong = [
            body | {"logprob_start_len": 5},
            body | {"logprob_start_len": -1},
            body | {"logprob_start_len": "x"},
            body | {"logprob_start_len": 0, "stream": True},
            body | {"input_ids": 5},
            body | {"sampling_params": {"max_new_tokens": "5"}},
        ]
        refused = [await gateway.post("/generate", each) for each in wrong]
    assert status == 200
    for ids, each in zip(many, told, strict=True):
        meta = each["meta_info"]
        assert (each["text"], each["output_ids"]) == ("", [])
        assert (meta["completion_tokens"], meta["weight_version"]) == (0, "3")
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        first, *scored = meta["input_token_logprobs"]
        assert first == [None, ids[2], None]
        assert scored == [[-token / VOCABULARY, token, None] for token in ids[3:]]
    for each in both:
        assert each["output_ids"] == continued(IDS, 3, version=3)
        meta = each["meta_info"]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == IDS
        assert meta["input_top_logprobs"][1:] == [
            [[-token / VOCABULARY, token, None]] for token in IDS[1:]
        ]
    assert [status for status, _ in refused] == [400] * len(wrong)


async def test_sglang_s_clients_get_no_empty_text_where_none_can_be_made() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with gateway_on(engine, **NO_RENDERER) as gateway:
        status, told = await gateway.post("/generate", {"input_ids": IDS})
    assert status == 503
    assert "cannot be rendered" in told["error"]


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ({"guided_json": {}}, "no such field"),
        ({"max_new_tokens": 4}, "did you mean"),
        ({"top_kk": 3}, "did you mean 'top_k'"),
        ({"kv_transfer_params": {"a": 1}}, "the gateway routes"),
        ({"use_beam_search": True}, "not offered"),
    ],
)
async def test_openai_s_routes_refuse_what_vllm_would_silently_ignore(
    field: dict[str, Any], hint: str
) -> None:
    harmless = {"store": False, "metadata": {"a": "b"}, "user": "u", "kv_transfer_params": None}
    async with served() as (gateway, _):
        for route, prompt in (
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/completions", {"prompt": "hello"}),
        ):
            status, told = await gateway.post(route, prompt | field)
            assert status == 400
            assert next(iter(field)) in told["error"]["message"]
            assert hint in told["error"]["message"]
            assert (await gateway.post(route, prompt | harmless | {"max_tokens": 2}))[0] == 200


@pytest.mark.parametrize(
    ("route", "prompt"),
    [("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "hello"})],
)
async def test_a_stream_has_the_prompt_s_ids_once_for_each_choice_and_usage_as_it_goes(
    route: str, prompt: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    more = {"stream": True, "stream_options": options, "return_token_ids": True, "n": 2}
    async with served() as (gateway, _), aiohttp.ClientSession() as session:
        body = prompt | more | {"max_tokens": 120}
        async with session.post(f"{gateway.url}{route}", json=body) as response:
            events = (await response.text()).strip().split("\n\n")
    chunks = [json.loads(each.removeprefix("data: ")) for each in events[:-1]]
    assert len(chunks) > 4
    choices = [choice | chunk for chunk in chunks for choice in chunk["choices"]]
    shown = [each["prompt_token_ids"] for each in choices if "prompt_token_ids" in each]
    assert shown == [IDS, IDS]
    for index in range(2):
        own = [each["token_ids"] for each in choices if each["index"] == index]
        assert [token for ids in own for token in ids] == continued(IDS, 120, version=0)
    for index in range(2):
        counts = [c["usage"]["completion_tokens"] for c in choices if c["index"] == index]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == 120, "as vLLM counts them: each choice its own"
    assert chunks[-1]["usage"]["completion_tokens"] == 240


async def test_vllm_s_route_fans_samples_out_and_counts_tokens() -> None:
    async with served() as (gateway, _):
        body = {
            "request_id": "r",
            "token_ids": IDS,
            "sampling_params": {"max_tokens": 4, "n": 2, "seed": 3},
            "return_token_ids": True,
        }
        status, told = await gateway.post("/inference/v1/generate", body)
    assert status == 200
    assert [choice["index"] for choice in told["choices"]] == [0, 1]
    assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    assert told["prompt_token_ids"] == IDS


ENDLESS = 100_000


async def test_an_abort_ends_a_stream_of_text_under_the_reply_s_own_id() -> None:
    text, ends, reply_id = "", [], ""
    async with served() as (gateway, client):
        chunks = await client.chat.completions.create(
            model="job",
            messages=HELLO,
            max_tokens=ENDLESS,
            stream=True,
            extra_headers={"X-Request-Id": "mine"},
        )
        async for chunk in chunks:
            if not reply_id:
                reply_id = chunk.id
                assert (await gateway.post("/abort_requests", {"request_ids": [reply_id]}))[
                    0
                ] == 200
            text += chunk.choices[0].delta.content or ""
            ends += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
    assert reply_id == "chatcmpl-mine"
    assert ends == ["abort"]
    assert text == text_of(continued(IDS, len(text), version=0))


async def test_requests_of_one_id_are_requests_of_their_own() -> None:
    async with served() as (_, client):
        named = {"X-Request-Id": "same"}
        replies = await asyncio.gather(
            *(
                client.completions.create(
                    model="job", prompt=prompt, max_tokens=4, extra_headers=named
                )
                for prompt in ("hello", "world")
            )
        )
    assert [reply.id for reply in replies] == ["cmpl-same"] * 2
    assert replies[0].choices[0].text != replies[1].choices[0].text


async def test_sglang_s_clients_abort_by_rid_and_by_session() -> None:
    async with served() as (gateway, _):
        body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": ENDLESS}}
        for more, path, meant in (
            ({"rid": "r"}, "/abort_request", {"rid": "r"}),
            ({"routing_key": "s"}, "/close_session", {"session_id": "s"}),
        ):
            work = asyncio.create_task(gateway.post("/generate", body | more))
            await gateway.until_tokens(2)
            assert (await gateway.post(path, meant))[1]["aborted"] == 1
            status, told = await work
            assert status == 200
            assert told["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted"}
            assert told["output_ids"] == continued(IDS, len(told["output_ids"]), version=0)


async def test_every_dialect_says_what_becomes_of_an_interrupted_turn() -> None:
    async with served() as (gateway, _):
        partial = {"on_interrupt": "return_partial"}
        works = [
            asyncio.create_task(gateway.post(path, body | partial))
            for path, body in (
                ("/v1/completions", {"prompt": "hello", "max_tokens": ENDLESS}),
                ("/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": ENDLESS}}),
            )
        ]
        await gateway.until_tokens(2, turns=2)
        assert (await gateway.publish(1))[0] == 200
        (_, completion), (_, generated) = await asyncio.gather(*works)
    choice = completion["choices"][0]
    assert (choice["finish_reason"], choice["fault"][:20]) == ("abort", "interrupted (switch)")
    assert generated["meta_info"]["finish_reason"]["message"].startswith("interrupted (switch)")


async def test_tokens_are_named_by_id_for_clients_that_train_on_them() -> None:
    named = {"logprobs": 0, "return_tokens_as_token_ids": True, "max_tokens": 4}
    async with served() as (gateway, _):
        gateway_ids = continued(IDS, 4, version=0)
        status, told = await gateway.post("/v1/completions", {"prompt": "hello"} | named)
        chat, said = await gateway.post(
            "/v1/chat/completions", {"messages": HELLO} | named | {"logprobs": True}
        )
    names = [f"token_id:{token_id}" for token_id in gateway_ids]
    assert (status, chat) == (200, 200)
    assert told["choices"][0]["logprobs"]["tokens"] == names
    assert all(each <= 0 for each in told["choices"][0]["logprobs"]["token_logprobs"])
    assert [each["token"] for each in said["choices"][0]["logprobs"]["content"]] == names


async def test_the_eos_that_ended_a_choice_has_its_log_probability() -> None:
    wanted = continued(IDS, 8, version=0)
    async with served(eos=[wanted[2]]) as (gateway, _):
        body = {"prompt": "hello", "logprobs": 0, "return_tokens_as_token_ids": True}
        _, told = await gateway.post("/v1/completions", body)
    (choice,) = told["choices"]
    ended = wanted.index(wanted[2]) + 1
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in wanted[:ended]]
    assert choice["text"] == text_of(wanted[: ended - 1])


async def test_a_turn_without_a_name_gets_one() -> None:
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 4}}
    async with served() as (gateway, _):
        told = [await gateway.post("/inference/v1/generate", body) for _ in range(2)]
    assert [status for status, _ in told] == [200, 200]
    names = {reply["request_id"] for _, reply in told}
    assert len(names) == 2
    assert all(names)


@pytest.mark.parametrize("parses", [False, True])
async def test_a_stream_s_chunks_cost_few_calls_and_repeat_the_prompt_for_a_parser_alone(
    parses: bool,
) -> None:
    fake, text = FakeRenderer(parses=parses), ""
    async with served(fake=fake) as (_, client):
        chunks = await client.chat.completions.create(
            model="job", messages=HELLO, max_tokens=100, stream=True, user="u" * 1000
        )
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
    assert text == text_of(continued(IDS, 100, version=0))
    first, *rest = fake.chunk_bytes
    assert len(rest) < 50, "tokens come each millisecond, chunks each fifty"
    assert first > 1000
    assert all(size > 1000 for size in rest) == parses


async def test_chunks_of_a_completion_do_not_carry_its_other_prompts() -> None:
    fake = FakeRenderer()
    async with served(fake=fake) as (gateway, _), aiohttp.ClientSession() as session:
        body = {"prompt": ["hello" * 40] * 64, "max_tokens": 2, "stream": True}
        async with session.post(f"{gateway.url}/v1/completions", json=body) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
    assert len(fake.chunk_bytes) >= 64
    assert max(fake.chunk_bytes) < 1000


async def test_an_echo_is_the_prompt_with_its_log_probabilities_before_what_was_sampled() -> None:
    async with served() as (_, client):
        asked = {"model": "job", "prompt": "hello", "logprobs": 1, "echo": True}
        whole = await client.completions.create(max_tokens=3, **asked)
        plain = await client.completions.create(
            max_tokens=3, **{name: value for name, value in asked.items() if name != "logprobs"}
        )
        alone = await client.completions.create(max_tokens=0, **asked)
    wanted = [*IDS, *continued(IDS, 3, version=0)]
    assert (plain.choices[0].text, plain.choices[0].logprobs) == (text_of(wanted), None)
    prompt = [None, *(-token / 256 for token in IDS[1:])]
    for choice, ids in ((whole.choices[0], wanted), (alone.choices[0], IDS)):
        assert choice.text == text_of(ids)
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == [text_of([token]) for token in ids]
        assert choice.logprobs.token_logprobs == [*prompt, *(-t / 256 for t in ids[len(IDS) :])]
        assert choice.logprobs.text_offset == list(range(len(ids)))
        assert choice.logprobs.top_logprobs[0] is None


async def test_chat_returns_the_prompt_s_log_probabilities_as_vllm_does() -> None:
    async with served() as (_, client):
        reply = await client.chat.completions.create(
            model="job", messages=HELLO, max_tokens=2, n=2, extra_body={"prompt_logprobs": 0}
        )
    scores = reply.model_dump()["prompt_logprobs"]
    assert scores[0] is None
    assert [list(each) for each in scores[1:]] == [[str(token)] for token in IDS[1:]]


async def test_frameworks_find_what_they_probe_for() -> None:
    async with served() as (gateway, client):
        assert (await gateway.generate("r", 1))[0] == 200, "its engines are known"
        assert (await client.models.retrieve("fake")).model_dump()["max_model_len"] == 1 << 20
        with pytest.raises(openai.NotFoundError, match="no such model"):
            await client.models.retrieve("org/other")
        assert await gateway.get("/version") == (200, {"version": "0.32.0+fake"})
        async with aiohttp.ClientSession(gateway.url) as session:
            for call in (session.get, session.post):
                async with call("/ping") as reply:
                    assert reply.status == 200


async def test_a_request_s_id_may_be_long_and_of_any_characters() -> None:
    name = "proxy/" * 100 + "\x85"
    async with served() as (gateway, client):
        reply = await client.chat.completions.create(
            model="job", messages=HELLO, max_tokens=2, extra_body={"request_id": name}
        )
        body = {"messages": HELLO, "max_tokens": 2}
        status, again = await gateway.post(
            "/v1/chat/completions", body, {"X-Request-Id": "x" * 4000}
        )
    assert reply.id == f"chatcmpl-{name}"
    assert (status, again["id"]) == (200, "chatcmpl-" + "x" * 4000)


URL = {"url": "http://169.254.169.254/"}
IMAGE = {"type": "image_url", "image_url": URL}
MEDIA_PARTS = (
    IMAGE,
    {"image_url": URL},
    {"type": "text", "uuid": "a", "input_image": "file:///etc/passwd"},
    {"type": "audio_url", "audio_url": URL},
    {"input_audio": {"data": "UklGRg==", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
    {"type": "file", "file": {"file_id": "file:///etc/passwd"}},
)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, "image_url"),
        ("chat/completions", {"messages": [{"content": [{"image_url": "x"}]}]}, "media"),
        ("chat/completions", {"messages": HELLO, "echo": True}, "echo"),
        ("completions", {"prompt": "a", "echo": True, "stream": True}, "echo"),
        ("completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("completions", {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_media_and_fields_that_a_renderer_ignores_are_refused_before_it(
    path: str, body: dict[str, Any], named: str
) -> None:
    async with gateway_on(FakeEngine(step_s=0.0, epoch=None), renderers=["http://[::1]:9"]) as gate:
        status, reply = await gate.post(f"/v1/{path}", body)
    assert (status, named in reply["error"]["message"]) == (400, True), reply


@pytest.mark.parametrize("path", ["/v1/chat/completions", *RENDERER_ROUTES])
async def test_no_route_lets_a_renderer_open_what_a_message_names(path: str) -> None:
    """In the same words everywhere; the renderer would answer a call that reaches it with 503."""
    asked: list[dict[str, Any]] = [
        {"messages": [*HELLO, {"role": "user", "content": ["hi", part]}]} for part in MEDIA_PARTS
    ]
    more = ({"messages": HELLO, "prompt_embeds": "AAAA"}, {"messages": {"content": [IMAGE]}})
    async with gateway_on(FakeEngine(step_s=0.0, epoch=None), renderers=["http://[::1]:9"]) as gate:
        media = [await gate.post(path, body) for body in asked]
        others = [await gate.post(path, body) for body in more]
    for status, reply in media:
        assert status == 400
        assert str(reply["error"]).count(": media is not routed; send text") == 1, reply
    assert [status for status, _ in others] == [400, 400]
    assert "prompt_embeds" in str(others[0])


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/tokenize"])
async def test_a_renderer_is_given_no_settings_of_media(path: str) -> None:
    """Clients send them with text too; older engines hand them to their processors."""
    seen: list[dict[str, Any]] = []

    async def take(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"token_ids": [1], "sampling_params": {"max_tokens": 1}})

    app = web.Application()
    app.add_routes([web.post(path, take)])
    site = Site()
    await site.serve(app)
    settings = {"mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"video": {}}}
    try:
        async with gateway_on(FakeEngine(step_s=0.0, epoch=None), renderers=[site.url]) as gate:
            status, _ = await gate.post(path, {"messages": HELLO, "model": "job"} | settings)
    finally:
        await site.close()
    assert (status, seen) == (200, [{"messages": HELLO}])
