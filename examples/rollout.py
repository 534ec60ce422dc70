"""One turn through the gateway: ids in; ids, log-probabilities and their origin out.

    python examples/rollout.py --job job-a --version 3 --tokens 1,17,42,9

An `abort` is no loss: the tokens so far are good, and the next turn goes on from them.
In an event loop, `AsyncRolloutClient` is the same with `await`.
"""

import argparse

from scheduler import RolloutClient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateway", default="http://127.0.0.1:8300")
    parser.add_argument("--job", required=True)
    parser.add_argument("--version", type=int, help="weights that must sample it; any by default")
    parser.add_argument("--tokens", default="1,17,42,9", help="the context, as ids")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()

    prompt = [int(each) for each in given.tokens.split(",")]
    sampling = {"max_tokens": given.max_tokens, "temperature": 1.0, "stop_token_ids": [2]}
    with RolloutClient(given.gateway, given.job) as client:
        choice = client.generate(
            prompt, sampling, trajectory="example-trajectory", weight_version=given.version
        )
    print(f"{len(choice.token_ids)} tokens, {choice.finish_reason}: {list(choice.token_ids)}")
    print("log-probabilities:", [round(each, 3) for each in choice.log_probs])
    for span in choice.spans:
        print(f"tokens {span.start} to {span.end}: version {span.version}, ", end="")
        print(f"{span.engine} ({span.numerics})")


if __name__ == "__main__":
    main()
