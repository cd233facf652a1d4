"""Saves and loads through a pool in shared memory on a real device: streams, registered segments, checksums there."""

import os
import secrets

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed: its kernels are not checked here")

from headwater.stores.embedded import destroy  # noqa: E402
from headwater.stores.url import parse_url  # noqa: E402
from headwater.transfer import registered  # noqa: E402
from transfer_layer_cases import (  # noqa: E402
    check_abandoned,
    check_deadline,
    check_failed_launch,
    check_full_ring,
    check_late_gathers,
    check_layer_damage,
    check_layer_load,
    check_layer_save,
    check_never_computed,
    check_save_in_a_step,
)
from transfer_pool_cases import (  # noqa: E402
    EXTENT,
    check_bounds,
    check_damage,
    check_load,
    check_save,
    check_save_together,
    check_several_by_layers,
)


@pytest.fixture
def url():
    name = f"shm:///headwater-test-{os.getpid()}-{secrets.token_hex(4)}"
    yield f"{name}?capacity=32MiB"
    destroy(parse_url(name))


@pytest.mark.parametrize("ring", [2 * EXTENT // 8, 64 * EXTENT])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_saved_on_the_device_and_read_on_the_cpu(url, tp, ring):
    check_save(url, "cuda", tp, ring)
    assert not registered._uses


@pytest.mark.parametrize("ring", [2 * EXTENT // 8, 64 * EXTENT])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_written_by_the_cpu_and_loaded_on_the_device(url, tp, ring):
    check_load(url, "cuda", tp, ring)


def test_requests_are_saved_together(url):
    check_save_together(url, "cuda", 64 * EXTENT)


def test_a_flipped_byte_is_found_on_the_device(url):
    check_damage(url, "cuda")


@pytest.mark.parametrize("group_bytes", [1, None])
@pytest.mark.parametrize("ring", [4 * EXTENT, 64 * EXTENT])
def test_several_requests_come_along_with_one_step(url, ring, group_bytes):
    check_several_by_layers(url, "cuda", ring, group_bytes)


def test_a_full_ring_drops_and_a_cancelled_load_ends(url):
    check_bounds(url, "cuda")


def test_without_registration_the_bytes_go_through_pinned_memory(url, monkeypatch):
    monkeypatch.setattr(registered.Registered, "address", lambda self, segment: None)
    check_save(url, "cuda", 2, 8 * EXTENT)
    check_load("memory://?capacity=32MiB", "cuda", 2, 8 * EXTENT)


@pytest.mark.parametrize("ring", [2 * EXTENT // 8, 3 * EXTENT, 64 * EXTENT])
@pytest.mark.parametrize("tp", [1, 2, 8, 16])
def test_saved_layer_by_layer_beside_a_slow_stream(url, tp, ring):
    check_layer_save(url, "cuda", tp, ring)
    assert not registered._uses


@pytest.mark.parametrize("group_bytes", [2 * EXTENT // 8, 2 * EXTENT, 6 * EXTENT])
@pytest.mark.parametrize("tp", [1, 8])
def test_saved_in_groups_of_layers(url, tp, group_bytes):
    check_layer_save(url, "cuda", tp, 64 * EXTENT, group_bytes)


@pytest.mark.parametrize("ring", [2 * EXTENT // 8, 64 * EXTENT])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_loaded_layer_by_layer_for_a_stream_that_waits(url, tp, ring):
    check_layer_load(url, "cuda", tp, ring)


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_damaged_tile_ends_a_load_by_layers(url, layer):
    check_layer_damage(url, "cuda", layer)


def test_a_full_ring_in_the_middle_of_a_step(url):
    check_full_ring(url, "cuda")


def test_a_step_that_was_not_finished(url):
    check_abandoned(url, "cuda")


def test_a_step_that_was_not_begun(url):
    check_never_computed(url, "cuda")


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_launch_that_fails(url, layer):
    check_failed_launch(url, "cuda", layer)


def test_a_save_in_the_middle_of_a_step(url):
    check_save_in_a_step(url, "cuda")


def test_gathers_that_begin_after_the_last_layer(url):
    check_late_gathers(url)


def test_nobody_waits_longer_than_the_deadline(url):
    check_deadline(url, "cuda")


def test_layer_by_layer_through_pinned_memory(url, monkeypatch):
    monkeypatch.setattr(registered.Registered, "address", lambda self, segment: None)
    check_layer_save(url, "cuda", 2, 16 * EXTENT)
    check_layer_load("memory://?capacity=32MiB", "cuda", 2, 8 * EXTENT)
