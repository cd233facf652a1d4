"""A chat whose turns go to two servers in turn: each finds in the pool what the other computed.

    python examples/chat_two_servers.py

Starts two `headwater serve` on one pool, and removes both afterwards. Needs `pip install '.[serve]'`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack

from servers import chat, log_book, model_options, running, temporary_pool

QUESTIONS = (
    "How high did the water stand on day 3?",
    "And on the day after?",
    "Was that higher or lower?",
    "What is this log book about?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="One chat on two servers that share a pool.")
    parser.add_argument("--model", help="a directory, a GGUF file, a name, or `random`; SmolLM2 if not given")
    parser.add_argument("--days", type=int, default=60, help="length of the document that the chat is about")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=24, help="of each answer")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers and the pool go, too

    with ExitStack() as stack:
        model = stack.enter_context(model_options(args.model))
        pool = stack.enter_context(temporary_pool())
        sizes = ["--max-model-len", "4096", "--num-pages", "512"]
        print("two servers are loading the model …", flush=True)
        servers = [stack.enter_context(running("serve", *model, *sizes, "--pool", pool)) for _ in range(2)]
        for server in servers:
            chat(server, [{"role": "user", "content": "Hello."}], 1)  # the first request of a process is slow

        messages = [{"role": "system", "content": log_book(args.days)}]
        total = found = 0
        for turn in range(args.turns):
            messages.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]})
            answer = chat(servers[turn % 2], messages, args.max_tokens)
            messages.append({"role": "assistant", "content": answer.text})
            found_now = f"{answer.cached_tokens} of {answer.prompt_tokens} tokens found"
            seconds = f"first token after {answer.first_token_s:.2f} s"
            print(f"turn {turn + 1} on server {turn % 2 + 1}: {found_now}, {seconds}: {answer.text!r}", flush=True)
            if turn:
                total, found = total + answer.prompt_tokens, found + answer.cached_tokens
    if args.turns > 1:
        print(f"after the first turn the servers computed {total - found} of {total} prompt tokens")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
