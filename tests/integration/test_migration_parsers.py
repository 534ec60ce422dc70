"""vLLM's own parsers beside the rule of benchmarks.migration's judge, at every chunking drawn."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.migration.chat_judge import wrong_parts
from benchmarks.migration.chat_plan import TOOL, Chat
from benchmarks.migration.model import END_THINK_ID, FIRST_ID, THINK_ID, VOCABULARY, write_model
from benchmarks.migration.records import RequestRecord
from benchmarks.migration.reference import ModelText
from benchmarks.migration.replies import Reply
from benchmarks.migration.rollout_routes import RolloutRoute

pytestmark = pytest.mark.engine

SAID = [{"role": "user", "content": "go"}]
CALL = f'<tool_call>{{"name": "{TOOL}", "arguments": {{"city": "Rome"}}}}</tool_call>'
CASES = 200


class VllmParsers:
    """The parts that vLLM makes of a chat's tokens, whole and in chunks."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer
        from vllm.parser import ParserManager

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._parser = ParserManager.get_parser(
            tool_parser_name="hermes",
            reasoning_parser_name="deepseek_r1",
            enable_auto_tools=True,
            model_name="m",
            tokenizer=self.tokenizer,
        )

    def _made(self, chat: Chat) -> tuple[Any, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(model="m", **chat.fields)
        assert self._parser is not None
        return self._parser(self.tokenizer, request.tools), request

    def whole(self, chat: Chat, text: str, ids: list[int]) -> Reply:
        parser, request = self._made(chat)
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=ids
        )
        told = {number: [one.name, one.arguments] for number, one in enumerate(calls or ())}
        return Reply(reasoning=reasoning, text=content, calls=told)

    def streamed(self, chat: Chat, chunks: Sequence[tuple[str, list[int]]]) -> Reply:
        parser, request = self._made(chat)
        reply = Reply()
        for number, (text, ids) in enumerate(chunks):
            delta = parser.parse_delta(
                text, ids, request, prompt_token_ids=[1, 70], finished=number == len(chunks) - 1
            )
            if delta is not None:
                reply.append({"delta": delta.model_dump(exclude_none=True)})
        return reply


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    made = tmp_path_factory.mktemp("parsers") / "model"
    texts = [Path("README.md").read_text()]
    write_model(made, texts=texts, context_tokens=256, seed=3)
    return made


def drawn(random: Random, encoded: list[int]) -> list[int]:
    """Output with or without an end of reasoning and a call, cut anywhere; of characters that
    are whole."""
    plain = [random.choice(encoded[:12]) for _ in range(random.randint(0, 12))]
    parts = [plain, [END_THINK_ID] * (random.random() < 0.8), plain[:4]]
    if random.random() < 0.7:
        parts.append(encoded)
    ids = [one for part in parts for one in part]
    return ids[: random.randint(1, len(ids))] if ids and random.random() < 0.5 else ids


@pytest.mark.parametrize("tool_choice", ["", "none", "auto", "required"])
def test_the_judge_s_rule_is_what_vllm_s_parsers_make(model: Path, tool_choice: str) -> None:
    parsers, text, random = VllmParsers(model), ModelText(model), Random(0)
    chat = Chat(messages=SAID, tool_choice=tool_choice)
    call_ids = parsers.tokenizer.encode(CALL, add_special_tokens=False)
    assert THINK_ID not in call_ids
    assert all(FIRST_ID <= one < VOCABULARY for one in call_ids)
    called = 0
    for _ in range(CASES):
        ids = drawn(random, call_ids)
        if not ids:
            continue
        cuts = sorted({0, len(ids), *random.choices(range(len(ids)), k=random.randint(0, 8))})
        chunks = [ids[a:b] for a, b in pairwise(cuts)]
        replies = (
            (parsers.whole(chat, text(ids), ids), []),
            (parsers.streamed(chat, [(text(one), one) for one in chunks]), ["event"]),
        )
        for reply, events in replies:
            request = RequestRecord(
                trajectory="t0",
                body={"sampling_params": {}, **chat.fields},
                route=RolloutRoute.CHAT,
                sent_s=0.0,
                events=events,
            )
            wrong = wrong_parts(request, ids, reply, ends=frozenset(), text=text)
            assert wrong == "", (text(ids), chunks)
            called += bool(reply.calls)
    assert (called > 0) == (tool_choice in ("auto", "required"))
