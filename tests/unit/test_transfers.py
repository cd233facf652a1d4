"""`kv_transfer_params`: read from requests, refused by name where it is wrong, and never more than a hint."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headwater.connector.orders import LoadOrder, StepOrders, TransferJob
from headwater.connector.transfers import MAX_WAIT_S, TransferParams, parse_transfer
from headwater.connector.wire import orders_from_wire, orders_to_wire
from headwater.errors import InvalidArgumentError, RequestError
from headwater.kv.hashing import ChunkRef
from headwater.pool.wait import Wait
from headwater.serve.messages import Submit, decode_to_engine, encode
from headwater.serve.openai import MAX_TRANSFER_BYTES, parse_chat, parse_completion


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_prefill": True, "remote_port": 7}, None),
        ({"headwater": {}}, TransferParams()),
        ({"headwater": {"transfer": "ab", "wait_s": 5}}, TransferParams(id="ab", wait_s=5.0)),
        ({"headwater": {"transfer": "ab", "start_s": 0.5, "colour": 7}}, TransferParams(id="ab", start_s=0.5)),
        ({"headwater": {"transfer": "ab", "push_to": "host:7700"}}, TransferParams(id="ab", push_to="host:7700")),
        ({"headwater": {"transfer": None, "wait_s": None}}, TransferParams()),
    ],
)
def test_what_requests_say(params: Any, expected: TransferParams | None) -> None:
    assert parse_transfer(params) == expected


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        ({"transfer": 7}, "transfer"),
        ({"transfer": ""}, "transfer"),
        ({"transfer": "a" * 257}, "transfer"),
        ({"transfer": "a\nb"}, "transfer"),
        ({"push_to": ["host"]}, "push_to"),
        ({"wait_s": "30"}, "wait_s"),
        ({"wait_s": True}, "wait_s"),
        ({"wait_s": -1}, "wait_s"),
        ({"wait_s": float("nan")}, "wait_s"),
        ({"wait_s": MAX_WAIT_S + 1}, "wait_s"),
        ({"start_s": {}}, "start_s"),
    ],
)
def test_wrong_values_are_named(ours: Any, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"kv_transfer_params\.headwater\.{name}: expected"):
        parse_transfer({"headwater": ours})


@pytest.mark.parametrize("params", [[], "x", 7, {"headwater": []}, {"headwater": "x"}])
def test_what_is_no_object_is_refused(params: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="expected an object"):
        parse_transfer(params)


def test_a_transfer_is_expected_by_the_server_that_gets_it() -> None:
    assert TransferParams(id="7").is_expected
    assert not TransferParams().is_expected
    assert not TransferParams(id="7", push_to="host:7700").is_expected
    assert not TransferParams(id="7", wait_s=0.0).is_expected


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_server_passes_it_on_and_refuses_what_is_wrong(is_chat: bool) -> None:
    def parse(params: Any) -> Any:
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
        body = json.dumps(prompt | {"kv_transfer_params": params}).encode()
        return (parse_chat if is_chat else parse_completion)(body)

    assert parse(None).transfer is None
    assert parse({"headwater": {"transfer": "ab", "wait_s": 5}}).transfer == TransferParams(id="ab", wait_s=5.0)
    for wrong in ({"headwater": {"wait_s": "x"}}, {"headwater": 7}, [], "x", {"other": "x" * MAX_TRANSFER_BYTES}):
        with pytest.raises(RequestError) as caught:
            parse(wrong)
        assert (caught.value.param or "").startswith("kv_transfer_params")


def test_the_engine_process_gets_it() -> None:
    from headwater.engine.params import SamplingParams

    message = Submit("r", [1, 2], SamplingParams(), None, TransferParams(id="ab", wait_s=5.0))
    assert decode_to_engine(encode(message)[4:]) == message


def test_a_load_that_waits_keeps_its_times_on_the_wire() -> None:
    chunk = ChunkRef(b"k" * 32, b"p" * 32, 0, 0, 16, b"p" * 32)
    job = TransferJob.of("r", [chunk], np.arange(4, dtype=np.int32))
    for wait in (None, Wait(30.0, 2.0, 30.0)):
        fields, arrays = orders_to_wire(StepOrders(loads=(LoadOrder(job, wait=wait),)))
        (order,) = orders_from_wire(json.loads(json.dumps(fields)), arrays).loads
        assert order.wait == wait
    for wrong in ([1.0], [1.0, 2.0, "x"], [1.0, 2.0, -1.0], [1.0, 2.0, 1e9], 7):
        fields["loads"][0]["wait"] = wrong
        with pytest.raises(InvalidArgumentError):
            orders_from_wire(fields, arrays)
