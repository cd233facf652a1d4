"""Gather, scatter, checksums and 2-D copies on a real device, against the plain way, the CPU's and the C library."""

import mmap
import random
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed: its kernels are not checked here")

from headwater.kernels.extent_triton import move_rows_triton  # noqa: E402
from headwater.kernels.post import fetch, post  # noqa: E402
from headwater.kernels.touch import touch_rows  # noqa: E402
from headwater.kernels.xxh3 import finish_tiles, unsigned, xxh3_tiles, xxh3_tiles_cpu  # noqa: E402
from headwater.kv.format import checksum  # noqa: E402
from headwater.kv.spec import KVSpec  # noqa: E402
from headwater.kv.topology import Shard, whole_shard  # noqa: E402
from headwater.pool.buffers import RawBuffer  # noqa: E402
from headwater.transfer.convert import PageSpan, gather, plan_spans, scatter  # noqa: E402
from headwater.transfer.copy import register_host, unregister_host  # noqa: E402
from headwater.transfer.extents import ExtentPiece, copy_extents  # noqa: E402
from headwater.transfer.verify import staged_checksums, verify_staged  # noqa: E402
from headwater.transfer.view import view_tensors  # noqa: E402

from transfer_cases import check_checksums, check_gather, check_scatter, check_sums, random_case  # noqa: E402

LENGTHS = [0, 1, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 144, 240]
LENGTHS += [241, 256, 257, 1023, 1024, 1025, 1088, 1089, 17 * 1024 + 1, 17 * 1024 + 8, 131072]


@pytest.fixture(scope="module")
def mapping():
    """Sixteen megabytes of shared memory, registered."""
    memory = np.frombuffer(mmap.mmap(-1, 16 << 20), np.uint8)
    memory[:] = 0xA5
    register_host(memory)
    yield memory
    torch.cuda.synchronize()
    unregister_host(memory)


@pytest.mark.parametrize("draw", range(8))
def test_moves(draw):
    seed = random.randrange(2**31)
    check_gather(random.Random(seed), "cuda", move_rows_triton)
    check_scatter(random.Random(seed + 1), "cuda", move_rows_triton)


@pytest.mark.parametrize("count", [0, 1, 1000, 5000])
def test_answers_do_not_wait_for_the_copy_engine(count):
    """Behind a copy of a gigabyte on another stream, an answer is there long before that copy has ended."""
    for source in (torch.randint(-(2**63), 2**63 - 1, (count,), device="cuda"), torch.rand(count, device="cuda") < 0.5):
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        large, there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"), torch.empty(1 << 30, dtype=torch.uint8)
        there = there.pin_memory()
        post(source, target)  # compiled
        torch.cuda.synchronize()
        if count:
            target.fill_(0)
        copies, own = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(copies):
            there.copy_(large, non_blocking=True)
            ended = copies.record_event()
        with torch.cuda.stream(own):
            post(source, target)
            answered = own.record_event()
        answered.synchronize()
        assert not ended.query()
        got = target.clone()
        torch.cuda.synchronize()
        assert torch.equal(got, source.cpu())


@pytest.mark.parametrize("draw", range(8))
def test_checksums(draw):
    check_checksums(random.Random(random.randrange(2**31)), "cuda", xxh3_tiles)


@pytest.mark.parametrize("length", LENGTHS)
def test_checksums_of_every_class(length):
    tiles = torch.randint(0, 256, (5, length), dtype=torch.uint8, device="cuda")
    assert torch.equal(xxh3_tiles(tiles).cpu(), xxh3_tiles_cpu(tiles.cpu()))


def test_model_sized_kv_equals_the_cpu():
    spec = KVSpec.gqa(num_layers=3, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    host = [
        torch.randint(-(2**15), 2**15, (2, 200, 16, 8, 128), dtype=torch.int16).view(torch.bfloat16) for _ in range(3)
    ]
    axes = ("plane", "block", "token", "head", "dim")
    blocks = random.sample(range(200), 100)
    spans = [PageSpan(blocks, start, min(256, 1500 - start)) for start in range(0, 1500, 256)]
    staged = []
    for tensors in (host, [tensor.cuda() for tensor in host]):
        view = view_tensors(spec, tensors, axes)
        plan = plan_spans(view, whole_shard(spec), spans)
        flat = torch.empty(plan.staged_bytes(3), dtype=torch.uint8, device=view.device)
        gather(plan, range(3), flat)
        sums = staged_checksums(plan, flat, 3)
        assert verify_staged(plan, flat, 3, sums).all()
        staged.append((flat.cpu(), sums.cpu()))
        before = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.view(torch.int16)[:, blocks] = 1
        scatter(plan, range(3), flat)
        span = (2, len(blocks), 16)
        rows = torch.arange(span[1] * 16, device=view.device).view(1, *span[1:])[..., None, None] < 1500
        for old, new in zip(before, tensors, strict=True):
            got, want = new.view(torch.int16)[:, blocks], old.view(torch.int16)[:, blocks]
            assert torch.equal(got, torch.where(rows, want, torch.ones_like(want)))
    assert torch.equal(staged[0][0], staged[1][0])
    assert torch.equal(staged[0][1], staged[1][1])


def test_offsets_beyond_two_to_the_31():
    spec = KVSpec.gqa(num_layers=1, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    base = torch.empty(130 * 2**24, device="cuda", dtype=torch.bfloat16)
    planes = [base.as_strided((130, 16, 2, 64), (2**24, 128, 64, 1), storage_offset=at) for at in (0, 2**20)]
    blocks = [129, 3, 128]
    for plane in planes:
        plane[blocks] = torch.randn(3, 16, 2, 64, device="cuda").to(torch.bfloat16)
    view = view_tensors(spec, [planes], ("block", "token", "head", "dim"))
    plan = plan_spans(view, whole_shard(spec), [PageSpan(blocks, 0, 48)])
    flat = torch.empty(plan.staged_bytes(1), dtype=torch.uint8, device="cuda")
    gather(plan, range(1), flat)
    want = torch.stack([plane[blocks].reshape(48, 2, 64) for plane in planes]).permute(2, 0, 1, 3)
    assert torch.equal(flat.view(torch.bfloat16).view(2, 2, 48, 64), want)
    for plane in planes:
        plane[blocks] = 0
    scatter(plan, range(1), flat)
    again = torch.stack([plane[blocks].reshape(48, 2, 64) for plane in planes]).permute(2, 0, 1, 3)
    assert torch.equal(again, want)


def test_two_dimensional_copies_touch_their_rows_only(mapping):
    extents = mapping[: 6 * 5 * 4 * 3000].reshape(6, 5, 4, 3000)
    extents[:] = 0xA5
    ring = torch.randint(0, 256, (5, 3, 2, 3000), dtype=torch.uint8, device="cuda")
    some, errors = [0, 1, 2, 4, 5], []
    piece, device = ExtentPiece(Shard(range(1, 4), range(1, 3)), 3000), torch.device("cuda", 0)
    stored = [(0, extents[i].ctypes.data) for i in some]

    def copy():
        try:
            copy_extents(piece, stored, [part.data_ptr() for part in ring], 4, device, to_host=True)
            torch.cuda.synchronize()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=copy)  # one that has never used the device
    thread.start()
    thread.join()
    assert not errors
    want = np.full_like(extents, 0xA5)
    want[some, 1:4, 1:3] = ring.cpu().numpy()
    assert np.array_equal(extents, want)
    back = torch.zeros_like(ring)
    copy_extents(piece, stored, [part.data_ptr() for part in back], 4, device, to_host=False)
    assert torch.equal(back, ring)
    whole = torch.randint(0, 256, (6, 5, 4, 3000), dtype=torch.uint8, device="cuda")
    every, piece = [(0, extent.ctypes.data) for extent in extents], ExtentPiece(Shard(range(5), range(4)), 3000)
    copy_extents(piece, every, [part.data_ptr() for part in whole], 4, device, to_host=True)
    torch.cuda.synchronize()
    assert np.array_equal(extents, whole.cpu().numpy())


def test_a_kernel_stores_straight_into_registered_memory(mapping):
    case = random_case(random.Random(5), "cuda")
    plan, layers = case.plan, case.shard.layers
    flat = torch.empty(plan.staged_bytes(len(layers)), dtype=torch.uint8, device="cuda")
    gather(plan, layers, flat)
    address, targets = mapping.ctypes.data, []
    for span in range(plan.num_spans):
        targets.append(RawBuffer(address))
        address += plan.tile_bytes(span) * len(layers) * len(case.shard.heads)
    gather(plan, layers, targets)
    torch.cuda.synchronize()
    assert np.array_equal(mapping[: flat.numel()], flat.cpu().numpy())
    assert unsigned(staged_checksums(plan, flat, len(layers)))[0] == checksum(mapping[: plan.tile_bytes(0)].tobytes())


@pytest.mark.parametrize("seed", range(12))
def test_checksums_that_a_gather_begins(seed):
    check_sums(random.Random(seed), "cuda", move_rows_triton, finish_tiles)


def test_fetched_numbers_arrive_though_their_memory_is_used_again():
    """Behind a stream that is busy, many times over: whoever gets the pinned memory next must not be seen."""
    busy = torch.randn(4096, 4096, device="cuda")
    fetched = []
    for number in range(200):
        busy @ busy
        fetched.append(fetch(torch.full((1000,), number), torch.device("cuda", 0)))
    for number, tensor in enumerate(fetched):
        assert (tensor == number).all()


def test_touching_changes_nothing():
    memory = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8).pin_memory()
    before = memory.clone()
    starts = memory.data_ptr() + torch.arange(4) * (16 << 20)
    touch_rows(starts, 128 << 10, 16, 1 << 20, torch.device("cuda", 0))
    touch_rows(starts[:1], 8, 1, 8, torch.device("cuda", 0))
    torch.cuda.synchronize()
    assert torch.equal(memory, before)
