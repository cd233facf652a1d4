"""Parts of the proxy that need no server: settings, bodies of the two legs, usage, the documented metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from headwater.errors import ConfigError, EngineConfigError, RequestError
from headwater.proxy.calls import parse_call
from headwater.proxy.config import ProxyConfig, ServerSpec
from headwater.proxy.metrics import COUNTED, SNAPSHOT
from headwater.proxy.server import run_proxy
from headwater.proxy.upstream import end_to_end
from headwater.proxy.usage import EventFilter, cached_tokens, with_cached_tokens

DOCS = Path(__file__).parents[2] / "docs"


def test_a_server_is_named_with_its_options() -> None:
    plain = ServerSpec.parse("http://h:8000/v1/")
    assert (plain.url, plain.peer, plain.weight) == ("http://h:8000", None, 1.0)
    spec = ServerSpec.parse("https://h:1,peer=g:7700,weight=2.5,events=tcp://h:5557,replay=tcp://h:5558")
    assert (spec.peer, spec.weight, spec.events, spec.replay) == ("g:7700", 2.5, "tcp://h:5557", "tcp://h:5558")
    tiers = ServerSpec.parse("http://h:1,weight=2,pool=shm:///a?capacity=1GiB,file:///b")
    assert tiers.pool == "shm:///a?capacity=1GiB,file:///b"


@pytest.mark.parametrize(
    "text",
    ["h:8000", "ftp://h", "http://", "http://h:x", "http://h:0", "http://u:secret@h", "http://h?x=1", "http://h,peer=",
     "http://h,peer=h", "http://h,peer=h:99999", "http://h,weight=0", "http://h,weight=nan", "http://h,weight=x",
     "http://h,colour=red", "http://h,peer=a:1,peer=b:1", "http://h,replay=tcp://x:1", "http://h,pool=",
     "http://h,events=tcp://x:1,pool=shm:///a"],
)  # fmt: skip
def test_what_is_no_server_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSpec.parse(text)
    assert "secret" not in str(caught.value)


def test_settings_that_cannot_work_are_refused() -> None:
    server = ServerSpec.parse("http://h:1")
    ProxyConfig(decode=(server,), prefill=(server,))
    for options in (
        {"decode": ()}, {"decode": (server, server)}, {"policy": "best"}, {"host": "0.0.0.0"}, {"api_key": ""},
        {"max_total_body_bytes": 1}, {"ssl_keyfile": "x"},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            ProxyConfig(**({"decode": (server,)} | options))  # type: ignore[arg-type]
    ProxyConfig(decode=(server,), host="0.0.0.0", insecure=True)
    assert "hush" not in repr(ProxyConfig(decode=(server,), api_key="hush", admin_key="hush"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1"])
@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), ("no certificate", "NO_CERTIFICATE")])
def test_certificates_that_cannot_be_read_are_named_before_anything_listens(
    url: str, content: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.proxy.server.bound_socket", lambda *_: pytest.fail("it was about to serve"))
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    config = ProxyConfig(decode=(ServerSpec.parse(url),), port=0, upstream_ca=str(path))
    with pytest.raises(EngineConfigError, match=f"--upstream-ca .*ca.pem cannot be used: {reason}"):
        run_proxy(config)


def test_the_prefill_leg_asks_for_one_token_of_the_same_prompt() -> None:
    body = {
        "messages": [{"role": "user", "content": "é"}], "tools": [1], "max_completion_tokens": 9, "min_tokens": 5,
        "n": 3, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "temperature": 0,
        "cache_salt": "s",
    }  # fmt: skip
    sent = json.loads(parse_call(json.dumps(body).encode(), is_chat=True).for_prefill("h:1", "ab"))
    assert sent == {
        "messages": body["messages"], "tools": [1], "temperature": 0, "cache_salt": "s", "max_tokens": 1,
        "stream": False, "kv_transfer_params": {"headwater": {"push_to": "h:1", "transfer": "ab"}},
    }  # fmt: skip


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b"{", b'{"kv_transfer_params": 7}', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_call(body, is_chat=True)


@pytest.mark.parametrize(
    ("body", "is_single"),
    [('{"prompt": "a"}', True), ('{"prompt": [1, 2]}', True), ('{"prompt": ["a", "b"]}', False), ("{}", False),
     ('{"prompt": [[1], [2]]}', False)],
)  # fmt: skip
def test_requests_of_several_prompts_are_told_apart(body: str, is_single: bool) -> None:
    assert parse_call(body.encode(), is_chat=False).is_single is is_single


def usage(cached: int | None, prompt: int = 100) -> dict[str, object]:
    details = None if cached is None else {"cached_tokens": cached, "audio_tokens": 0}
    return {"prompt_tokens": prompt, "completion_tokens": 4, "prompt_tokens_details": details}


@pytest.mark.parametrize(
    ("own", "other", "shown"), [(0, 64, 64), (64, 7, 64), (None, 64, 64), (None, 0, None), (5, 500, 100)]
)
def test_the_larger_count_is_shown_but_never_more_than_the_prompt(
    own: int | None, other: int, shown: int | None
) -> None:
    body = json.dumps({"id": "x", "usage": usage(own), "y": 1.10}).encode()
    changed = json.loads(with_cached_tokens(body, other))
    details = changed["usage"]["prompt_tokens_details"]
    assert (None if details is None else details["cached_tokens"]) == shown
    assert changed["y"] == 1.1
    assert cached_tokens(json.dumps(changed).encode()) == (shown or 0)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"usage": 7}', b'"usage"', b'{"usage": {"prompt_tokens_details": 7}'])
def test_odd_answers_pass_as_they_are(body: bytes) -> None:
    assert with_cached_tokens(body, 5) == body
    assert cached_tokens(body) == 0


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(0, 3))
def test_a_stream_that_is_cut_anywhere_says_the_same(cuts: list[int], at_least: int) -> None:
    events = [f'data: {{"choices": [{number}]}}\n\n' for number in range(3)]
    events += [f"data: {json.dumps({'choices': [], 'usage': usage(1)})}\n\n", ": a comment\n\n", "data: [DONE]\n\n"]
    stream = "".join(events).encode()
    found = EventFilter()
    found.at_least = at_least
    out, start = b"", 0
    for cut in [*cuts, len(stream)]:
        out += found.feed(stream[start : start + cut])
        start += cut
    out += found.finish()
    shown = [json.loads(line[6:]) for line in out.decode().splitlines() if line.startswith("data: {")]
    assert shown[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == max(1, at_least)
    assert [event["choices"] for event in shown[:-1]] == [[0], [1], [2]]
    assert out.endswith(b": a comment\n\ndata: [DONE]\n\n")


def test_events_of_other_line_ends_do_not_wait() -> None:
    found = EventFilter()
    found.at_least = 9
    assert found.feed(b"data: {}\r\n\r\n") == b"data: {}\r\n\r\n"
    assert found.feed(b"data: {") == b"data: {"


def test_headers_of_one_connection_are_not_passed_on() -> None:
    headers = [(b"Connection", b"close, X-Own"), (b"x-own", b"1"), (b"Host", b"h"), (b"Authorization", b"k")]
    assert end_to_end(headers) == [(b"authorization", b"k")]


def test_the_documented_table_is_the_declaration() -> None:
    lines = (DOCS / "routing.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| metric | kind | meaning |") + 2
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    rows = []
    for row in (*COUNTED, *SNAPSHOT):
        labels = f"{{{','.join(row.labels)}}}" if row.labels else ""
        rows.append(f"| `{row.name}{labels}` | {row.kind} | {row.help} |")
    assert lines[start:end] == rows


def test_a_proxy_loads_no_engine() -> None:
    heavy = ("headwater.engine", "headwater.models", "torch", "transformers")
    code = f"import sys, headwater.proxy.server; print([m for m in sys.modules if m.startswith({heavy})])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
