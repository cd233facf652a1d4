"""Rows of experts on a real device: padded graphs count their real rows only, and reading waits for no step."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed: its kernels are not checked here")

from headwater.bench.engine_shapes import SHAPES  # noqa: E402
from headwater.engine.config import EngineConfig  # noqa: E402
from headwater.engine.engine import Engine  # noqa: E402
from headwater.engine.params import SamplingParams  # noqa: E402

SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 64, "vocab_size": 512, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}


@pytest.mark.parametrize("graphs", [False, True])
def test_padding_rows_of_graphs_are_not_counted(tmp_path, graphs):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-30b-a3b"] | SMALL))
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", device="cuda", max_model_len=256, memory_ratio=0.1, cuda_graphs=graphs
    )
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    with Engine(config) as engine:
        assert int(engine.expert_rows().sum()) == 0
        for number in range(3):  # no graph has three rows
            engine.add(str(number), [number * 10 + i for i in range(20)], params)
        while engine.has_work:
            engine.step()
        torch.cuda.synchronize()
        rows = engine.expert_rows()
        # A step that was launched before the last tokens were known may have run for nothing.
        possible = {4 * (3 * (20 + 8) + late) for late in range(4)}
        assert all(int(total) in possible for total in rows.sum(dim=1)), rows
        engine.expert_rows(wait=False)
        torch.cuda.synchronize()
        assert torch.equal(engine.expert_rows(wait=False), rows)
