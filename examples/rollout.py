"""One turn through the gateway: ids in; ids, log-probabilities and their origin out.

    python examples/rollout.py --job job-a --version 3 --tokens 1,17,42,9

Needs nothing but Python. An `abort` is no loss: the tokens so far are good, and the next request
goes on from them under a new request id.
"""

import argparse
import json
import urllib.request
import uuid
from collections.abc import Sequence
from typing import Any


def turn(
    token_ids: Sequence[int], *, version: int | None, max_tokens: int = 64, stop_token_id: int = 2
) -> dict[str, Any]:
    """A request for one turn, sampled by exactly `version`; None takes any served version."""
    return {
        "request_id": uuid.uuid4().hex,
        "token_ids": list(token_ids),
        "sampling_params": {
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "stop_token_ids": [stop_token_id],
        },
        "weight_version": {} if version is None else {"exact": version},
    }


def generate(gateway_url: str, job: str, trajectory: str, body: dict[str, Any]) -> dict[str, Any]:
    """The one choice. Raises HTTPError: 409 says that the version is served nowhere any more.

    A large batch waits in the gateway. After a timeout the same body asks for the same turn.
    """
    request = urllib.request.Request(
        f"{gateway_url}/inference/v1/generate",
        data=json.dumps(body).encode(),
        headers={
            "Content-Type": "application/json",
            "X-RoseMux-Job": job,
            "X-Session-ID": trajectory,
        },
    )
    with urllib.request.urlopen(request, timeout=3600) as reply:
        choice: dict[str, Any] = json.load(reply)["choices"][0]
    return choice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateway", default="http://127.0.0.1:8300")
    parser.add_argument("--job", required=True)
    parser.add_argument("--version", type=int, help="weights that must sample it; any by default")
    parser.add_argument("--tokens", default="1,17,42,9", help="the context, as ids")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()

    prompt = [int(each) for each in given.tokens.split(",")]
    body = turn(prompt, version=given.version, max_tokens=given.max_tokens)
    choice = generate(given.gateway, given.job, "example-trajectory", body)
    print(f"{len(choice['token_ids'])} tokens, {choice['finish_reason']}: {choice['token_ids']}")
    print("log-probabilities:", [round(t["logprob"], 3) for t in choice["logprobs"]["content"]])
    for span in choice["spans"]:
        print(f"tokens {span['start']} to {span['end']}: version {span['version']}, ", end="")
        print(f"{span['engine']} ({span['numerics']})")


if __name__ == "__main__":
    main()
