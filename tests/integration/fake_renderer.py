"""vLLM's renderer, faked: text is one character a token."""

from typing import Any

from aiohttp import web

from harvester.contracts.wire.rollouts import SamplingParams


def text_of(token_ids: list[int]) -> str:
    return "".join(chr(0x100 + token) for token in token_ids)


def sampling_of(body: dict[str, Any]) -> dict[str, Any]:
    """As vLLM renders it: every field, with the values that only it understands."""
    given = {name: body[name] for name in SamplingParams.__struct_fields__ if name in body}
    return given | {
        "max_tokens": body.get("max_tokens") or 8,
        "n": body.get("n") or 1,
        "temperature": body.get("temperature", 1.0),
        "seed": body.get("seed"),
        "logprobs": (logprobs := None if body.get("logprobs") is None else int(body["logprobs"])),
        "prompt_logprobs": logprobs if body.get("echo") else body.get("prompt_logprobs"),
        "stop": body.get("stop") or [],
        "skip_clone": True,
        "output_kind": 2,
        "output_text_buffer_length": 3,
    }


def decoded_logprobs(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """As vLLM's renderer decodes them: text, whatever the request says of token ids."""
    return [
        {
            "token": text_of([each["token_id"]]),
            "logprob": each["logprob"],
            "top_logprobs": [
                {"token": text_of([one["token_id"]]), "logprob": one["logprob"]}
                for one in each["top_logprobs"]
            ],
        }
        for each in choice["logprobs"]["content"]
    ]


def flat(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": [each["token"] for each in content],
        "token_logprobs": [each["logprob"] for each in content],
        "top_logprobs": [
            {one["token"]: one["logprob"] for one in each["top_logprobs"]} or None
            for each in content
        ],
        "text_offset": list(range(len(content))),
    }


class FakeRenderer:
    """vLLM's render and derender routes, on text that is one character a token."""

    def __init__(self, *, parses: bool = False, context: int = 1 << 20) -> None:
        self.parses = parses
        self.context = context
        self.chunk_bytes: list[int] = []
        self.derendered = 0
        """Calls for whole completions."""

    def app(self, app: web.Application | None = None) -> web.Application:
        """The routes alone, or beside those of an engine's `app`."""
        app = app or web.Application()
        app.add_routes(
            [
                web.post("/v1/chat/completions/render", self.render_chat),
                web.post("/v1/completions/render", self.render_completion),
                web.post("/v1/chat/completions/derender", self.derender_chat),
                web.post("/v1/completions/derender", self.derender_completion),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
            ]
        )
        return app

    async def render_chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("temperature", 0) < 0:
            error = {"message": "temperature must be non-negative", "code": 400}
            return web.json_response({"error": error}, status=400)
        ids = [ord(c) % 256 for message in body["messages"] for c in message["content"]]
        if len(ids) > self.context:
            told = f"This model's maximum context length is {self.context} tokens."
            return web.json_response({"error": {"message": told, "code": 400}}, status=400)
        sampling = sampling_of(body)
        sampling["max_tokens"] = min(sampling["max_tokens"], self.context - len(ids))
        return web.json_response({"token_ids": ids, "sampling_params": sampling})

    async def render_completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        given = body["prompt"]
        if isinstance(given, list) and isinstance(given[0], int):
            prompts = [given]
        else:
            texts = given if isinstance(given, list) else [given]
            prompts = [[ord(c) % 256 for c in each] for each in texts]
        sampling = sampling_of(body)
        return web.json_response([{"token_ids": e, "sampling_params": sampling} for e in prompts])

    async def derender_chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("stream"):
            (choice,) = body["generate_chunk"]["choices"]
            # A parser's state holds the output, another's the end of what was decoded.
            state = body["stream_state"] or {"output_token_ids": []}
            if self.parses:
                assert len(body["prompt_token_ids"]) == 5, "a parser reads the whole prompt"
                state = {"output_token_ids": [*state["output_token_ids"], *choice["token_ids"]]}
            else:
                state = {"prev_tokens": [text_of(choice["token_ids"])]}
            self.chunk_bytes.append(request.content_length or 0)
            delta = {"content": text_of(choice["token_ids"])}
            told = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
            # vLLM 0.32 leaves them out where a parser reads the stream.
            if choice.get("logprobs") and not self.parses:
                told["logprobs"] = {"content": decoded_logprobs(choice)}
            return web.json_response(
                {
                    "chunk": {"object": "chat.completion.chunk", "created": 1, "choices": [told]},
                    "stream_state": state,
                }
            )
        choices = [
            {
                "index": choice["index"],
                "message": {"role": "assistant", "content": text_of(choice["token_ids"])},
                "logprobs": choice["logprobs"] and {"content": decoded_logprobs(choice)},
                "finish_reason": choice["finish_reason"],
            }
            for choice in body["generate_response"]["choices"]
        ]
        return web.json_response({"object": "chat.completion", "created": 1, "choices": choices})

    async def derender_completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("stream"):
            (choice,) = body["generate_chunk"]["choices"]
            text = text_of(choice["token_ids"])
            self.chunk_bytes.append(request.content_length or 0)
            told = {"index": 0, "text": text, "finish_reason": choice["finish_reason"]}
            if choice.get("logprobs"):
                told["logprobs"] = flat(decoded_logprobs(choice))
            chunk = {"object": "text_completion", "created": 1, "choices": [told]}
            return web.json_response({"chunk": chunk, "stream_state": {"prev_tokens": [text]}})
        self.derendered += 1
        told = [each for one in body["generate_responses"] for each in one["choices"]]
        choices = [
            {
                "index": at,
                "text": text_of(each["token_ids"]),
                **({"logprobs": flat(decoded_logprobs(each))} if each.get("logprobs") else {}),
                "finish_reason": each["finish_reason"],
            }
            for at, each in enumerate(told)
        ]
        return web.json_response({"object": "text_completion", "created": 1, "choices": choices})

    async def tokenize(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        return web.json_response({"tokens": [ord(c) % 256 for c in prompt]})

    async def detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": text_of((await request.json())["tokens"])})
