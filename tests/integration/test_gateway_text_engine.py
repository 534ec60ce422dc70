"""OpenAI's routes of the gateway beside those of the engine behind it.

The engine is real vLLM with a tool parser and a reasoning parser, and answers the same greedy
requests itself.
"""

import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.integration.gateway_in_process import GatewayInProcess, gateway_on

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

OWN_FIELDS = {"spans", "weight_versions", "immovable"}
"""Fields of a choice that only the gateway has."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
THINK = [{"role": "user", "content": "What is the weather in Paris? <think>"}]
"""The prompt opens the reasoning, whose budget vLLM counts from there."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a dedicated engine with random weights."""
    pytest.importorskip("vllm")
    from benchmarks.migration.model import ENGINE_ARGUMENTS
    from tests.integration.engine_slot import served_model

    root = tmp_path_factory.mktemp("text")
    parsers = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    arguments = (*ENGINE_ARGUMENTS, *parsers, "--reasoning-parser", "deepseek_r1")
    with served_model(root, name="job", context_tokens=512, arguments=arguments) as url:
        tokens = json.loads((root / "hf" / "tokenizer.json").read_text())["model"]["vocab"]
        # A model without a purpose fills its calls with the white space that JSON allows.
        CALLING["logit_bias"] |= {str(tokens[each]): -100 for each in tokens if set(each) <= BLANK}
        yield url


async def told(url: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.post(url + route, json=body) as reply:
        assert reply.status == 200, await reply.text()
        found: dict[str, Any] = await reply.json()
        return found


async def streamed(url: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """A stream folded to what a client makes of it."""
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with aiohttp.ClientSession() as session, session.post(url + route, json=asked) as reply:
        assert reply.status == 200, await reply.text()
        raw = (await reply.text()).strip().split("\n\n")
    assert raw[-1] == "data: [DONE]"
    found: dict[str, Any] = {"text": "", "reasoning": "", "ids": [], "tools": {}}
    for event in raw[:-1]:
        chunk = json.loads(event.removeprefix("data: "))
        found["usage"] = chunk.get("usage") and counts(chunk["usage"])
        found.setdefault("prompt", chunk.get("prompt_token_ids"))
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            found["text"] += choice.get("text") or delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning") or ""
            found["ids"] += choice.get("token_ids") or []
            found["finish_reason"] = choice.get("finish_reason")
            found["prompt"] = found["prompt"] or choice.get("prompt_token_ids")
            for call in delta.get("tool_calls") or ():
                made = found["tools"].setdefault(call["index"], {"name": "", "arguments": ""})
                for name in made:
                    made[name] += call["function"].get(name) or ""
    return found


def shown(reply: dict[str, Any]) -> dict[str, Any]:
    """A whole reply's choice, without names that differ by request."""
    (choice,) = reply["choices"]
    choice = {name: value for name, value in choice.items() if name not in OWN_FIELDS}
    for call in (choice.get("message") or {}).get("tool_calls") or ():
        del call["id"]
    choice["logprobs"] = rounded(choice.get("logprobs"))
    usage = counts(reply["usage"])
    return {"choice": choice, "prompt": reply.get("prompt_token_ids"), "usage": usage}


def counts(usage: dict[str, Any]) -> dict[str, int]:
    """Without details, which the gateway does not add up over a turn's engines."""
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def rounded(logprobs: Any) -> Any:
    if isinstance(logprobs, float):
        return round(logprobs, 3)
    if isinstance(logprobs, list):
        return list(map(rounded, logprobs))
    if isinstance(logprobs, dict):
        return {name: rounded(each) for name, each in logprobs.items()}
    return logprobs


PLAIN = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
BUDGET = {"thinking_token_budget": 3, "skip_special_tokens": False}
BLANK = set("ĠĊčĉ")
"""White space as the tokenizer writes it."""
CALLING: dict[str, Any] = {"max_tokens": 96, "ignore_eos": False, "logit_bias": {}} | BUDGET
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "reasoning": (CHAT, {"messages": ASK} | PLAIN),
    "log-probabilities": (CHAT, {"messages": ASK, "logprobs": True, "top_logprobs": 2} | PLAIN),
    "tools": (
        CHAT,
        {"messages": THINK, "tools": [WEATHER], "tool_choice": "required"} | PLAIN | CALLING,
    ),
    "a named tool": (
        CHAT,
        {
            "messages": THINK,
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        }
        | PLAIN
        | CALLING,
    ),
    "completion": (COMPLETIONS, {"prompt": "The weather", "logprobs": 2} | PLAIN),
    "reasoning and content": (CHAT, {"messages": THINK} | PLAIN | BUDGET),
    "completion of ids": (COMPLETIONS, {"prompt": [1, 70, 80, 90]} | PLAIN),
}


@pytest.mark.parametrize("name", ASKED)
async def test_a_request_is_answered_as_by_the_engine_itself(engine: str, name: str) -> None:
    route, body = ASKED[name]
    async with gateway_on(engine) as gateway:
        await same(gateway, engine, route, body)


async def test_a_tool_call_is_one(engine: str) -> None:
    """Holds the comparison to a reply that has one."""
    async with gateway_on(engine) as gateway:
        for name in ("tools", "a named tool"):
            (choice,) = (await told(gateway.url, *ASKED[name]))["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("name", ["reasoning", "reasoning and content", "completion"])
async def test_a_stop_string_ends_the_text_as_the_engine_s_own(engine: str, name: str) -> None:
    route, body = ASKED[name]
    async with gateway_on(engine) as gateway:
        (choice,) = (await told(engine, route, body))["choices"]
        message = choice.get("message") or {"content": choice["text"]}
        text = message.get("content") or message["reasoning"]
        stop = text[len(text) // 2 :][:4]
        early = {"stop": [text[2:4], stop], "min_tokens": 8}
        # vLLM 0.32 parts a stream that it holds back for stop strings in the middle of `</think>`.
        streams = name != "reasoning and content"
        for stops in ({"stop": [stop]}, early):
            await same(gateway, engine, route, body | stops, streams=streams)


async def test_the_first_stop_string_after_min_tokens_ends_a_text_of_nothing_else(
    engine: str,
) -> None:
    route, body = ASKED["completion"]
    async with gateway_on(engine) as gateway:
        text = "er"
        asked = {"model": "job", "prompt": text, "add_special_tokens": False}
        (token,) = (await told(engine, "/tokenize", asked))["tokens"]
        repeated = {"logit_bias": {token: 100.0}, "stop": [text, text * 2], "min_tokens": 4}
        await same(gateway, engine, route, body | repeated)
        (choice,) = (await told(gateway.url, route, body | repeated))["choices"]
        assert choice["text"] == text * 4


async def same(
    gateway: GatewayInProcess,
    engine: str,
    route: str,
    body: dict[str, Any],
    *,
    streams: bool = True,
) -> None:
    wanted = await told(engine, route, body)
    assert shown(await told(gateway.url, route, body)) == shown(wanted)
    if not streams:
        return
    assert await streamed(gateway.url, route, body) == await streamed(engine, route, body)
