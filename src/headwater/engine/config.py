"""Every setting of the engine, with its default written once; the command line and the server read them from here."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.connector.config import AUTO, LOAD_MODES, ROLES, ConnectorConfig
from headwater.errors import EngineConfigError

LAYOUTS = ("layer-first", "page-first")
LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to run one model. Checked here as far as that needs no model and no device."""

    model: str
    """A checkpoint directory, a GGUF file, or a name that the catalog knows ("smollm2")."""
    load_format: str = "auto"
    """"dummy" gives random weights of the right shapes: the directory then needs only a config.json."""
    dtype: str = "auto"
    """"auto": bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    """None: what the model allows, or less where memory allows less."""
    page_size: int = 16
    num_pages: int | None = None
    """None: from measured memory."""
    memory_ratio: float | None = None
    """The part of free memory that weights, activations and KV may take; None: 0.9 on a GPU, 0.3 on a CPU."""
    cache_layout: str = "layer-first"
    prefix_cache: str = "radix"
    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    """Tokens of one step, prompts and decodes together; longer prompts are computed in chunks."""
    attention_backend: str = "auto"
    cuda_graphs: bool = True
    overlap: bool | None = None
    """Schedule the next step while the device computes this one; None: on a GPU."""
    speculative_ngram: int | None = None
    """Draft so many tokens by looking back (see `draft.ngram`); None: no drafts."""
    seed: int = 0
    """Where the seeds of requests that bring none start from."""
    num_threads: int | None = None
    """CPU threads of one rank; None: the cores there are, divided by the ranks."""
    pool: str | None = field(default=None, repr=False)
    """URL of the pool to share KV through, say shm:///headwater; None: share nothing. It may hold a password, so it
    is not shown."""
    pool_role: str = "both"
    pool_load: str = AUTO
    pool_saves_decoded: bool = True
    pool_group_bytes: int | None = None
    """Layers that move while others are computed go together until they have so many bytes; None: as suits."""
    peer_secret_file: str | None = None
    """What other hosts are shown before KV is pushed to them; None: only receivers of this host are pushed to."""
    peer_tls_cert: str | None = None
    """The certificate chain that this server shows to peers, whether it pushes or receives."""
    peer_tls_key: str | None = None
    """Its key, if that is in a file of its own."""
    peer_tls_ca: str | None = None
    """Who has signed the certificates of peers. Given this or a certificate, connections between peers are TLS."""
    peer_carrier: str = "tcp"
    """How KV travels to peers: `tcp`, or `nixl` where both ends name it."""

    @property
    def max_samples(self) -> int:
        """Rows of a step that are sampled at most: each sequence's next token, and one for each draft."""
        return self.max_num_seqs * (1 + (self.speculative_ngram or 0))

    @property
    def connector(self) -> ConnectorConfig | None:
        """How to use the pool; None where there is none."""
        if self.pool is None:
            return None
        return ConnectorConfig(
            pool=self.pool,
            role=self.pool_role,
            load_mode=self.pool_load,
            save_decoded=self.pool_saves_decoded,
            group_bytes=self.pool_group_bytes,
            peer_secret_file=self.peer_secret_file,
            peer_tls_cert=self.peer_tls_cert,
            peer_tls_key=self.peer_tls_key,
            peer_tls_ca=self.peer_tls_ca,
            peer_carrier=self.peer_carrier,
        )

    def __post_init__(self) -> None:
        _ = self.connector  # checks its part
        _one_of("pool_role", self.pool_role, ROLES)  # also where no pool is used: a typing error is one
        _one_of("pool_load", self.pool_load, LOAD_MODES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("cache_layout", self.cache_layout, LAYOUTS)
        _one_of("prefix_cache", self.prefix_cache, ("radix", "naive"))
        for name in ("tensor_parallel_size", "page_size", "max_num_seqs", "max_batched_tokens"):
            _at_least_one(name, getattr(self, name))
        for name in ("max_model_len", "num_pages", "num_threads", "speculative_ngram"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.memory_ratio is not None and not 0.0 < self.memory_ratio <= 1.0:
            raise EngineConfigError(f"memory_ratio is {self.memory_ratio}; expected above 0 and at most 1")
        if self.pool is not None:
            self._check_pool(self.pool)

    def _check_pool(self, pool: str) -> None:
        # They bring numpy, which a command line that is only parsed must not.
        from headwater.stores.config import find_pool
        from headwater.stores.url import first_tier

        if first_tier(find_pool(pool).urls).scheme == "memory" and self.tensor_parallel_size > 1:
            raise EngineConfigError(
                f"a memory:// pool lives in one process, and each of the {self.tensor_parallel_size} ranks would have "
                "one of its own and find nothing; use shm:// or file://"
            )


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise EngineConfigError(f"{name} is {value!r}; expected one of {', '.join(known)}")


def _at_least_one(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise EngineConfigError(f"{name} is {value!r}; expected an integer of at least 1")
