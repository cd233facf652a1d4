"""Prefill on one server, decode on another, a proxy in front: all on one machine.

    python examples/prefill_decode.py

Each server has a pool of its own, as on two hosts, and KV goes from one to the other over TCP. Everything is removed
afterwards. Needs `pip install '.[serve]'`. docs/disaggregation.md has the commands for several hosts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import ExitStack

from servers import Answer, chat, log_book, model_options, running, temporary_pool


def main() -> None:
    parser = argparse.ArgumentParser(description="A prefill server, a decode server and a proxy.")
    parser.add_argument("--model", help="a directory, a GGUF file, a name, or `random`; SmolLM2 if not given")
    parser.add_argument(
        "--days",
        type=int,
        default=60,
        help="length of the document; the proxy leaves prompts under 256 tokens to the decode server",
    )
    parser.add_argument("--max-tokens", type=int, default=24, help="of each answer")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers and the pools go, too

    with ExitStack() as stack:
        model = stack.enter_context(model_options(args.model))
        pools = [stack.enter_context(temporary_pool()) for _ in range(2)]
        # Both compute at the same time, so each gets half of the cores.
        threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
        options = [*model, "--max-model-len", "4096", "--num-pages", "512", "--num-threads", threads]
        print("a prefill server and a decode server are loading the model …", flush=True)
        prefill = stack.enter_context(running("serve", *options, "--pool", pools[0]))
        decode = stack.enter_context(running("serve", *options, "--pool", pools[1], "--peer-listen", "127.0.0.1:0"))
        proxy = stack.enter_context(running("proxy", "--prefill", prefill, "--decode", decode))
        for server in (prefill, decode):
            chat(server, [{"role": "user", "content": "Hello."}], 1)  # the first request of a process is slow

        def ask(name: str, url: str, title: str) -> Answer:
            text = f"{title}\n{log_book(args.days)}\nHow high did the water stand on day 3?"
            answer = chat(url, [{"role": "user", "content": text}], args.max_tokens)
            computed = answer.prompt_tokens - answer.cached_tokens
            print(
                f"{name}: {computed} of {answer.prompt_tokens} prompt tokens computed there, "
                f"first token after {answer.first_token_s:.2f} s: {answer.text!r}",
                flush=True,
            )
            return answer

        ask("decode server, asked directly", decode, "Volume one.")
        through = ask("decode server, behind the proxy", proxy, "Volume two.")
        again = ask("prefill server, asked the same", prefill, "Volume two.")
    print(f"same answer: {'yes' if through.text == again.text else 'NO'}")
    sys.exit(through.text != again.text)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
