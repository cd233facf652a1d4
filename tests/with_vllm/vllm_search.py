"""The runner of the search in `config_search`: vLLM's own model classes, built from a changed config.json over the same
weights, in one process and without an engine.

    python vllm_search.py FOLDER FAMILY FIRST all|sample:COUNT:NAME,NAME

makes the family's checkpoint in FOLDER unless it is there, and prints one JSON line before each change is tried and one
after it, so that a crash of vLLM's kernels names its change. `test_identity_search` starts it, with its environment.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import vllm
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.transformers_utils import repo_utils
from vllm.v1.attention.backend import CommonAttentionMetadata

from config_search import FAMILIES, Change, SearchFamily, all_changes
from headwater.errors import HeadwaterError
from headwater.integrations.vllm.declined import DeclinedError
from headwater.integrations.vllm.identity import server_identity
from headwater.integrations.vllm.options import read_options

NUM_PROMPT = 72
NUM_GREEDY = 8
TOLERANCE = 1e-4
"""Of the largest logit. Rounding of float32 stays three orders below."""
OPTIONS = read_options({}, "kv_both")
WEIGHTS = f"sha256:{0:064x}"


def save_family(family: SearchFamily, folder: Path) -> None:
    """A random checkpoint whose weights, norms and biases all matter. Costs a second."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family.model_type, **family.config)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.normal_(1.0 if "norm" in name else 0.0, 0.3 if "norm" in name else 0.2)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    full = json.loads(json.dumps(config.to_dict(), default=str)) | written
    kept = {key: value for key, value in full.items() if value is not None or family.config.get(key, 0) is None}
    (folder / "config.json").write_text(json.dumps(kept))


class OtherConfig:
    """One checkpoint under changing configs."""

    def __init__(self, family: SearchFamily, folder: Path) -> None:
        self.family = family
        self.folder = folder
        self.base = json.loads((folder / "config.json").read_text())
        self.other = folder / "other"
        self.other.mkdir(exist_ok=True)
        for path in folder.glob("*.safetensors*"):
            if not (self.other / path.name).exists():
                os.link(path, self.other / path.name)
        self.tokens = [(i * 37) % 250 + 3 for i in range(NUM_PROMPT)]
        config = self.config()
        self.name = self.identity(config)
        for _ in range(NUM_GREEDY):
            self.tokens.append(int(self.logits(self.config())[-1].argmax()))
        self.expected = self.logits(self.config())
        self.reference_name, self.reference = self.in_reference()
        self.by_name = {self.name: self.expected}
        if self.reference is not None:
            assert not self.differ(self.reference, self.by_name.setdefault(self.reference_name, self.reference))

    def config(self, change: Change | None = None) -> Any:
        """vLLM's whole configuration for the changed config.json."""
        values = self.base if change is None else change.apply(self.base)
        (self.other / "config.json").write_text(json.dumps(values))
        is_mla = "kv_lora_rank" in self.family.changes
        return EngineArgs(
            model=str(self.other),
            dtype="float32",
            enforce_eager=True,
            max_model_len=NUM_PROMPT + NUM_GREEDY,
            skip_tokenizer_init=True,
            **({"attention_backend": "CPU_MLA", "block_size": 16} if is_mla else {"block_size": 32}),
        ).create_engine_config()

    def identity(self, config: Any) -> str:
        """The name of this server's KV; raises DeclinedError."""
        return server_identity(config, OPTIONS, WEIGHTS).digest.hex()

    def logits(self, config: Any) -> torch.Tensor:
        """Logits of the last tokens, from one prefill through vLLM's class and its attention."""
        rotary_embedding._ROPE_DICT.clear()
        with set_current_vllm_config(config), torch.inference_mode():
            model = get_model(vllm_config=config)
            count, block = len(self.tokens), config.cache_config.block_size
            num_blocks = -(-count // block)
            common = CommonAttentionMetadata(
                query_start_loc=torch.tensor([0, count], dtype=torch.int32),
                query_start_loc_cpu=torch.tensor([0, count], dtype=torch.int32),
                seq_lens=torch.tensor([count], dtype=torch.int32),
                seq_lens_cpu_upper_bound=torch.tensor([count], dtype=torch.int32),
                num_reqs=1,
                num_actual_tokens=count,
                max_query_len=count,
                max_seq_len=count,
                block_table_tensor=torch.arange(num_blocks, dtype=torch.int32)[None],
                slot_mapping=torch.arange(count),
                positions=torch.arange(count),
            )
            metadata = {}
            for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
                spec, backend = layer.get_kv_cache_spec(config), layer.get_attn_backend()
                shape = (num_blocks, spec.num_kv_heads, block, 2 * spec.head_size)
                if "MLA" in backend.get_name():
                    shape = (num_blocks, block, spec.head_size)
                layer.kv_cache = torch.zeros(shape)
                metadata[name] = backend.get_builder_cls()(spec, [name], config, torch.device("cpu")).build(0, common)
            slots = dict.fromkeys(metadata, common.slot_mapping)
            with set_forward_context(metadata, config, num_tokens=count, slot_mapping=slots):
                hidden = model(torch.tensor(self.tokens), torch.arange(count))
                return model.compute_logits(hidden[-NUM_GREEDY:]).clone()

    def in_reference(self) -> tuple[str, torch.Tensor | None]:
        """The reference engine's name and logits for the config that lies there now; none where it refuses."""
        if not self.family.has_reference:
            return "", None
        from headwater.kv.identity import Identity, canonical_rope, canonical_settings
        from headwater.models.checkpoint import open_checkpoint

        from models_support import load_model, run_tokens

        try:
            config = open_checkpoint(self.other).config
            config.rope.check_length(len(self.tokens))
            if config.max_position_embeddings < len(self.tokens):
                return "refused: longer than the model", None
            logits = run_tokens(load_model(self.other), self.tokens)[-NUM_GREEDY:]
        except HeadwaterError as error:
            return f"refused: {error}", None
        name = Identity(
            weights=WEIGHTS,
            run_dtype="float32",
            kv_dtype="float32",
            rope=canonical_rope(json.loads(json.dumps(asdict(config.rope)))),
            settings=canonical_settings(config.settings),
        )
        return name.digest.hex(), logits

    def differ(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Beyond rounding. Some configs give no numbers at all; that is the same each time."""
        atol = TOLERANCE * float(self.expected.abs().max())
        return one.shape != other.shape or not torch.allclose(one, other, rtol=0.0, atol=atol, equal_nan=True)

    def try_change(self, change: Change) -> dict[str, Any]:
        """What one change does to names and numbers."""
        found: dict[str, Any] = {"field": change.name, "value": change.value}
        try:
            config = self.config(change)
            found["name"] = self.identity(config)
            found["renamed"] = found["name"] != self.name
            logits = self.logits(config)
            found["changed"] = self.differ(logits, self.expected)
            found["clash"] = self.differ(logits, self.by_name.setdefault(found["name"], logits))
        except DeclinedError as error:
            found["declined"] = str(error)
        except Exception as error:
            found["failed"] = f"{type(error).__name__}: {error}"[:200]
        name, mine = self.in_reference()
        if mine is not None:
            found["reference_changed"] = self.reference is None or self.differ(mine, self.reference)
            found["reference_clash"] = self.differ(mine, self.by_name.setdefault(name, mine))
        elif self.family.has_reference:
            found["reference_refused"] = name
        return found


def wanted_changes(changes: list[Change], wanted: str) -> list[Change]:
    """All of them, or those of the fields that are named and a random sample of the rest."""
    if wanted == "all":
        return changes
    _, count, names = wanted.split(":")
    named = [change for change in changes if change.name in names.split(",")]
    rest = [change for change in changes if change not in named]
    return named + random.Random(1).sample(rest, min(int(count), len(rest)))


def main(folder: str, family_name: str, first: str, wanted: str) -> None:
    torch.set_num_threads(1)
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU runner does
    repo_utils.time = SimpleNamespace(sleep=lambda seconds: None)  # a config that cannot be read stays that
    family, path = FAMILIES[family_name], Path(folder)
    if not path.exists():
        save_family(family, path)
    config = EngineArgs(model=str(path), dtype="float32", skip_tokenizer_init=True).create_engine_config()
    with tempfile.TemporaryDirectory() as temporary, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{temporary}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    search = OtherConfig(family, path)
    gc.collect()
    gc.freeze()  # vLLM collects twice a model, and most of what there is stays
    changes = wanted_changes(all_changes(family, search.base, Path(vllm.__file__).parent), wanted)
    print(json.dumps({"total": len(changes)}), flush=True)
    for number in range(int(first), len(changes)):
        print(
            json.dumps({"started": number, "field": changes[number].name, "value": changes[number].value}), flush=True
        )
        found = search.try_change(changes[number])
        print(json.dumps({"done": number, **found}), flush=True)
    shutil.rmtree(search.other)


if __name__ == "__main__":
    main(*sys.argv[1:])
