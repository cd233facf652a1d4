"""`headwater bench …`: measurements, for people by default and as one line of JSON with `--json`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from headwater.cli.bench_output import note, rounded
from headwater.cli.bench_peers import bench_peers
from headwater.cli.bench_vllm import bench_vllm
from headwater.cli.engine_options import needs_extra

bench_app = typer.Typer(help="Measure Headwater on this machine.", no_args_is_help=True, add_completion=False)


@bench_app.callback()
def _bench() -> None:
    """Measure Headwater on this machine."""


@bench_app.command("store")
def bench_store(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
    url: Annotated[str | None, typer.Option(help="Pool of tiles to create and remove, e.g. shm:///NAME.")] = None,
    tiles_gib: Annotated[float, typer.Option(help="GiB of tiles to move.", min=0.01, max=1024)] = 1.0,
    chunks: Annotated[int, typer.Option(help="Chunks in the pool for lookups.", min=1)] = 1_000_000,
    pairs: Annotated[int, typer.Option(help="Alternating pairs of pool and limit.", min=1)] = 9,
    redis: Annotated[bool, typer.Option("--redis/--no-redis", help="Compare with Redis and Mooncake servers.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Run everything once and small, as a smoke test.")] = False,
) -> None:
    """Measure the pool against the speed of the memory.

    Reads and writes tiles, looks prompts up among a million chunks, and compares with Redis and Mooncake.
    """
    from headwater.bench import store
    from headwater.cli.output import print_json

    full = store.StoreBench(tiles_bytes=int(tiles_gib * 2**30), num_chunks=chunks, pairs=pairs)
    report = store.run(replace(store.QUICK if quick else full, url=url, redis=redis, remote=redis), note)
    if as_json:
        print_json(rounded(report))
    else:
        _print_store(report)


@bench_app.command("engine")
def bench_engine(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
    model: Annotated[str, typer.Option(help="Model for the CPU: a checkpoint, or a catalog name.")] = ("smollm2"),
    seconds: Annotated[float, typer.Option(help="Start no further pair of CPU runs after this time.", min=1)] = 1200.0,
    cpu: Annotated[bool, typer.Option("--cpu/--no-cpu", help="Compare with transformers on the CPU.")] = True,
    gpu: Annotated[bool, typer.Option("--gpu/--no-gpu", help="Compare with the limits of the GPU, if any.")] = True,
    only: Annotated[
        str | None, typer.Option(help="Measure only these figures, separated by commas: of a GPU, or of n-gram drafts.")
    ] = None,
    model_shape: Annotated[
        str | None,
        typer.Option(help="Measure only whole steps on the GPU, with random weights of this shape, e.g. mixtral-8x7b."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run everything once and small, as a smoke test.")] = False,
) -> None:
    """Measure the engine against transformers and the GPU's limits.

    Serves many requests and a long prompt on the CPU; runs steps and kernels on the GPU, also against torch's.
    """
    from headwater.cli.output import print_json
    from headwater.errors import InvalidArgumentError

    with needs_extra("engine"):
        from headwater.bench import engine
        from headwater.bench.engine_drafts import DRAFTS_FIGURES

    plan = replace(engine.QUICK if quick else engine.EngineBench(), model=model)
    figures = None if only is None else frozenset(name.strip() for name in only.split(","))
    cpu = cpu and model_shape is None
    drafts = cpu and (figures is None or not figures.isdisjoint(DRAFTS_FIGURES))
    cpu = cpu and only is None
    try:
        chosen = replace(
            plan,
            cpu=replace(plan.cpu, seconds=seconds) if cpu and plan.cpu is not None else None,
            drafts=plan.drafts if drafts else None,
            gpu=plan.gpu if gpu else None,
            only=figures,
            model_shape=model_shape,
        )
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error)) from None
    report = engine.run(chosen, note)
    if as_json:
        print_json(rounded(report))
    else:
        _print_engine(report)


@bench_app.command("transfer")
def bench_transfer(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens of KV to move.", min=4096)] = 65536,
    staging_mib: Annotated[int, typer.Option(help="MiB of device memory between cache and pool.", min=64)] = 1024,
    pairs: Annotated[int, typer.Option(help="Alternating rounds.", min=1)] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Run everything once and small, as a smoke test.")] = False,
) -> None:
    """Measure saves and loads of a GPU's KV against one large copy."""
    from headwater.cli.output import print_json

    with needs_extra("engine"):
        from headwater.bench import transfer, transfer_gpu

    full = transfer_gpu.TransferBench(num_tokens=tokens, staging_bytes=staging_mib << 20, pairs=pairs)
    report = transfer.run(transfer.QUICK if quick else full, note)
    if as_json:
        print_json(rounded(report))
    else:
        _print_transfer(report)


@bench_app.command("router")
def bench_router(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
    requests: Annotated[int, typer.Option(help="Requests of the simulated workload.", min=200)] = 12_000,
    model: Annotated[str, typer.Option(help="Model of the two real servers.")] = "smollm2",
    real: Annotated[bool, typer.Option("--real/--no-real", help="Also run two real servers on the CPU.")] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run small and without real servers, as a smoke test.")
    ] = False,
) -> None:
    """Measure routing by cached tokens against round-robin.

    Also against an index without delay: cached tokens, balance and cost.
    """
    from headwater.cli.output import print_json

    with needs_extra("proxy"):
        from headwater.bench import router, router_real, router_sim

    full = router.RouterBench(
        work=router_sim.Workload(num_requests=requests),
        real=router_real.RealBench(model=model) if real else None,
    )
    report = router.run(router.QUICK if quick else full, note)
    if as_json:
        print_json(rounded(report))
    else:
        _print_router(report)


@bench_app.command("ttft")
def bench_ttft(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
    model: Annotated[str, typer.Option(help="Model for the CPU: a checkpoint, or a catalog name.")] = ("smollm2"),
    seconds: Annotated[float, typer.Option(help="Start no further CPU run after this time.", min=1)] = 900.0,
    cpu: Annotated[bool, typer.Option("--cpu/--no-cpu", help="Two servers on the CPU.")] = True,
    gpu: Annotated[bool, typer.Option("--gpu/--no-gpu", help="A long prompt on the GPU, if any.")] = True,
    device: Annotated[str, typer.Option(help="cpu: run the GPU's part on the CPU, in float32; for --quick.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Run everything once and small, as a smoke test.")] = False,
) -> None:
    """Measure the time to the first token of a pool hit.

    Compares with computing the same prompt.
    """
    from headwater.cli.output import print_json

    with needs_extra("engine"):
        from headwater.bench import ttft

    plan = replace(ttft.QUICK if quick else ttft.TtftBench(), model=model)
    chosen = replace(
        plan,
        cpu=replace(plan.cpu, seconds=seconds) if cpu and plan.cpu is not None else None,
        gpu=plan.gpu if gpu else None,
    )
    report = ttft.run(chosen, note, device)
    if as_json:
        print_json(rounded(report))
    else:
        _print_ttft(report)


@bench_app.command("packing")
def bench_packing(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
    model: Annotated[str, typer.Option(help="Model whose KV is packed: a checkpoint, or a catalog name.")] = "smollm2",
    pairs: Annotated[int, typer.Option(help="Alternating rounds.", min=1)] = 9,
    quick: Annotated[bool, typer.Option("--quick", help="Run everything once and small, as a smoke test.")] = False,
) -> None:
    """Measure how small packed KV is, and how fast a CPU packs it.

    Packs KV of real texts and of random weights, beside other codes, other compressors and a plain copy.
    """
    from headwater.cli.output import print_json

    with needs_extra("engine"):
        from headwater.bench import packing

    plan = packing.QUICK if quick else packing.PackingBench(pairs=pairs)
    report = packing.run(replace(plan, model=model), note)
    if as_json:
        print_json(rounded(report))
    else:
        _print_packing(report)


@bench_app.command("fleet")
def bench_fleet(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
    clients: Annotated[int, typer.Option(help="Concurrent clients.", min=1)] = 32,
    processes: Annotated[int, typer.Option(help="Processes that they are in.", min=1)] = 4,
    seconds: Annotated[float, typer.Option(help="How long they work.", min=0.1)] = 30.0,
    flips: Annotated[int, typer.Option(help="Bits to flip in stored chunks.", min=0)] = 1200,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test of seconds.")] = False,
) -> None:
    """Run many clients on three tiers while bits are flipped.

    The tiers are shared memory, files and Redis; every byte is compared.
    """
    from headwater.bench import fleet as bench
    from headwater.cli.output import console, print_json, table

    full = bench.FleetBench(clients=clients, processes=processes, seconds=seconds, flips=flips)
    report = bench.run(bench.QUICK if quick else full, note)
    if as_json:
        print_json(rounded(report))
    else:
        figures = table("fleet", ">")
        for name, value in report.items():
            if isinstance(value, (int, float)):
                figures.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else f"{value:,}")
        console().print(figures)
    raise typer.Exit(1 if report["wrong_bytes"] else 0)


bench_app.command("peers")(bench_peers)
bench_app.command("vllm")(bench_vllm)


def _print_store(report: dict[str, Any]) -> None:
    from headwater.cli.output import table

    speeds = table("verified 128 KiB tiles", ">pool GB/s", ">limit GB/s", ">ratio", ">noise")
    for verb in ("read", "write"):
        for threads, suffix in (("one thread", ""), ("two threads", "_2t")):
            figures = [f"{verb}_gbps{suffix}", f"ceiling_{verb}_gbps{suffix}"]
            figures += [f"{verb}_vs_ceiling{suffix}", f"{verb}_noise{suffix}"]
            speeds.add_row(f"{verb}, {threads}", *(f"{report[name]:.2f}" for name in figures))
    speeds.add_row("copy without checksum", "", f"{report['memcpy_gbps']:.2f}")
    speeds.add_row("read, an array for each tile", f"{report['read_piece_gbps']:.2f}")
    speeds.add_row("read, whole chunks", f"{report['read_chunk_gbps']:.2f}")
    speeds.add_row("write, tile by tile", f"{report['write_tile_gbps']:.2f}")
    for verb in ("read", "write"):
        speeds.add_row(f"{verb}, file://", f"{report[f'file_{verb}_gbps']:.2f}")
        peer = report[f"redis_{verb}_gbps"]
        speeds.add_row(f"{verb}, Redis", report["redis_reason"] if peer is None else f"{peer:.2f}")

    other = table("finding and keeping", ">")
    tokens, among = f"{report['match_tokens']:,} tokens", f"{report['match_chunks']:,} chunks"
    other.add_row(f"hash {tokens}", f"{report['hash_ms']:.2f} ms")
    other.add_row(f"hash and match among {among}", f"{report['match_ms']:.2f} ms")
    other.add_row("match alone", f"{report['lookup_only_ms']:.2f} ms")
    other.add_row("write tiny chunks", f"{report['fill_chunks_per_s']:,.0f} a second")
    other.add_row("index in use / data", f"{report['overhead_ratio']:.5f}")
    other.add_row("index reserved / capacity", f"{report['index_reserved_ratio']:.5f}")
    other.add_row("import headwater", f"{report['import_ms']:.0f} ms")

    _print_tables(report, speeds, other)


_ENGINE_ROWS = (
    ("{requests} requests, tokens a second", "tokens_per_s"),
    ("  transformers, best static batches", "transformers_static_tokens_per_s"),
    ("  transformers, continuous batching", "transformers_continuous_tokens_per_s"),
    ("n-gram drafts, quoting: times as fast as without", "ngram_quote_ratio"),
    ("  noise of that", "ngram_quote_noise"),
    ("n-gram drafts, a story: times as fast as without", "ngram_story_ratio"),
    ("  noise of that", "ngram_story_noise"),
    ("prompt of {prefill_tokens} tokens, seconds", "prefill_s"),
    ("  transformers", "transformers_prefill_s"),
    ("GPU, decoding at batch 1, ms a step", "decode_b1_ms"),
    ("GPU, decoding at batch 64, ms a step", "decode_b64_ms"),
    ("GPU, prompt, ms", "gpu_prefill_ms"),
    ("GPU, experts, decoding at batch 1, ms a step", "moe_decode_b1_ms"),
    ("GPU, experts, decoding at batch 64, ms a step", "moe_decode_b64_ms"),
    ("GPU, experts, prompt, ms", "moe_gpu_prefill_ms"),
    ("GPU, grouped products of a prompt, ms", "grouped_ms"),
    ("GPU, a layer's experts, 64 rows, µs", "moe_decode_layer_us"),
    ("GPU, latent attention, 16 heads, µs", "mla_decode_16_us"),
    ("GPU, latent attention, 128 heads, µs", "mla_decode_128_us"),
    ("GPU, MLA's KV saved, GB/s", "mla_save_gbps"),
    ("GPU, MLA's KV loaded, GB/s", "mla_load_gbps"),
    ("  its copies, GB/s", "gpu_copy_gbps"),
    ("  its bf16 products, TFLOP/s", "gpu_matmul_tflops"),
)


def _print_engine(report: dict[str, Any]) -> None:
    from headwater.cli.output import table

    speeds = table("engine", ">")
    for title, name in _ENGINE_ROWS:
        if report.get(name) is not None:
            speeds.add_row(title.format_map(report), f"{report[name]:.4g}")
    for name in report:
        if name.endswith("_reason") and report[name]:
            speeds.add_row(f"{name.removesuffix('_reason')}: {report[name]}", "")
    _print_tables(report, speeds)


_TRANSFER_ROWS = (
    ("one large pinned copy out, GB/s", "copy_out_gbps"),
    ("  saved, visible and checksummed", "save_gbps"),
    ("  pages without re-ordering or checksums", "raw_save_gbps"),
    ("one large pinned copy in, GB/s", "copy_in_gbps"),
    ("  loaded and verified", "load_gbps"),
    ("  pages without re-ordering or checksums", "raw_load_gbps"),
    ("one rank of eight: saved, GB/s", "save_gbps_tp8"),
    ("one rank of eight: loaded, GB/s", "load_gbps_tp8"),
    ("beyond the bytes' time: a save, ms", "save_fixed_ms"),
    ("beyond the bytes' time: a load, ms", "load_fixed_ms"),
    ("a copy per head and token, s ({naive_note})", "naive_save_s"),
    ("  of one large copy", "naive_ratio"),
    ("saved beside matrix products, GB/s", "interference_saving_gbps"),
    ("packed: raw bytes saved, GB/s", "packed_save_gbps"),
    ("  loaded, GB/s", "packed_load_gbps"),
    ("  saved beside matrix products, GB/s", "packed_interference_saving_gbps"),
    ("a copy on the device, GB/s read and written", "device_copy_gbps"),
    ("  packed between cache and staging, GB/s of raw KV", "pack_gbps"),
    ("  unpacked", "unpack_gbps"),
)


def _print_transfer(report: dict[str, Any]) -> None:
    from headwater.cli.output import table

    speeds = table("transfer", ">")
    for title, name in _TRANSFER_ROWS:
        if report.get(name) is not None:
            speeds.add_row(title.format_map(report), f"{report[name]:.4g}")
    for name in ("gpu_reason", "note"):
        if report.get(name):
            speeds.add_row(str(report[name]), "")
    _print_tables(report, speeds)


_TTFT_ROWS = (
    ("CPU, {cpu_prompt_tokens} tokens: computed, s to the first token", "cpu_cold_s"),
    ("  by another server, from the pool, s", "cpu_hit_s"),
    ("  unique prompts: throughput that saving takes", "cpu_no_reuse_cost"),
    ("  noise of that", "cpu_no_reuse_noise"),
    ("GPU, {gpu_prompt_tokens} tokens: computed, ms to the first token", "recompute_ms"),
    ("  of the matrix rate", "gpu_prefill_mfu"),
    ("  from the pool, ms", "hit_ms"),
    ("  one large copy of the same bytes, ms", "bus_ms"),
    ("  a step of decoding, ms", "decode_step_ms"),
    ("  half of it from the pool, layer by layer, ms", "layerwise_ms"),
    ("  half of it from the pool, blocking, ms", "blocking_ms"),
)


def _print_ttft(report: dict[str, Any]) -> None:
    from headwater.cli.output import table

    times = table("time to the first token", ">")
    for title, name in _TTFT_ROWS:
        if report.get(name) is not None:
            times.add_row(title.format_map(report), f"{report[name]:.4g}")
    for name in ("cpu_reason", "gpu_reason"):
        if report.get(name):
            times.add_row(str(report[name]), "")
    _print_tables(report, times)


_PACKING_ROWS = (
    ("packed bytes over raw ones", "packed_share"),
    ("  values that are escapes", "escapes"),
    ("  in the block that has most of them", "escapes_worst"),
    ("  tiles that do not fit, of {tiles}", "misfit_tiles"),
    ("3-bit codes, with room for the worst tile", "three_bit_share"),
    ("entropy of the exponents, and no room for anything", "entropy_share"),
    ("float16 with 4-bit codes", "float16_share"),
    ("zlib", "zlib_share"),
    ("ZipNN", "zipnn_share"),
    ("one thread packs, GB/s of raw bytes", "pack_gbps_cpu"),
    ("  unpacks", "unpack_gbps_cpu"),
    ("  copies", "copy_gbps_cpu"),
    ("  compresses with zlib", "zlib_gbps_cpu"),
    ("  decompresses", "unzlib_gbps_cpu"),
    ("  compresses with ZipNN", "zipnn_gbps_cpu"),
    ("  decompresses", "unzipnn_gbps_cpu"),
    ("two threads pack", "pack_gbps_cpu_2t"),
    ("  unpack", "unpack_gbps_cpu_2t"),
)


def _print_packing(report: dict[str, Any]) -> None:
    from headwater.cli.output import table

    figures = table("packing", ">")
    for title, name in _PACKING_ROWS:
        if report.get(name) is not None:
            figures.add_row(title.format_map(report), f"{report[name]:.4g}")
    for name in [key for key in report if key.startswith("packed_share_")]:
        figures.add_row(f"random weights, {name.removeprefix('packed_share_')}", f"{report[name]:.4g}")
    for name, reason in (("KV of a model", "model_reason"), ("ZipNN", "zipnn_reason")):
        if report.get(reason):
            figures.add_row(f"{name}: {report[reason]}", "")
    _print_tables(report, figures)


_ROUTER_ROWS = (
    ("simulated, {num_requests} requests: cached share of prompt tokens", "cached_share"),
    ("  with an index without delay", "ideal_cached_share"),
    ("  without events", "history_cached_share"),
    ("  in turns", "round_robin_cached_share"),
    ("busiest server by the mean", "busiest_over_mean"),
    ("  all prompts alike, server by the first block", "first_block_busiest_over_mean"),
    ("hashing {decision_tokens} tokens, ms", "hash_ms"),
    ("  and choosing a server, ms", "decision_ms"),
    ("two real servers: cached share", "real_cached_share"),
    ("  in turns", "real_round_robin_cached_share"),
    ("  repeated tokens", "real_ideal_cached_share"),
)


def _print_router(report: dict[str, Any]) -> None:
    from headwater.cli.output import table

    figures = table("router", ">")
    for title, name in _ROUTER_ROWS:
        if report.get(name) is not None:
            figures.add_row(title.format_map(report), f"{report[name]:.4g}")
    if report.get("real_reason"):
        figures.add_row(str(report["real_reason"]), "")
    _print_tables(report, figures)


def _print_tables(report: dict[str, Any], *figures: Any) -> None:
    """What was measured, the bars, and the machine."""
    from headwater.cli.output import console, table

    bars = table("bar", ">limit", ">measured", "verdict")
    for name, bar in report["bars"].items():
        measured = "" if report[name] is None else f"{report[name]:.4g}"
        bars.add_row(name, f"{bar['limit']:g}", measured, bar["verdict"])
    out = console()
    for figures_of in (*figures, bars):
        out.print(figures_of)
        out.print()
    out.print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
