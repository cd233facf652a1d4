"""Every exception that Headwater raises on purpose, in one tree.

The data path does not raise for one bad item of a batch: it returns a `Status` for it. What is raised is
what a caller must change before going on: an argument, a URL, a permission, a version.

    HeadwaterError
    ├── InvalidArgumentError (ValueError)   an argument is wrong, whatever the store holds
    │   ├── SpecError                       a KVSpec that describes no possible KV
    │   ├── IdentityError                   weights that cannot be named with certainty
    │   │   └── WeightsChangedError         they changed while they were loaded or read
    │   ├── TopologyError                   a parallel layout that cannot exist for this spec
    │   ├── TokenError                      token ids or extras that cannot be hashed
    │   ├── BufferMismatchError             a caller's buffer has the wrong size, strides or rights
    │   ├── UrlError                        a store URL that cannot be understood
    │   ├── ConfigError                     a configuration file or variable that cannot be used
    │   ├── ModelError                      a checkpoint or config that this engine cannot run
    │   ├── EngineConfigError               settings that do not go together, or do not fit this machine
    │   └── RequestError                    one request asks for what the engine cannot give (too long, bad parameter)
    ├── EngineError                         the engine itself failed
    │   ├── MemoryBudgetError               too little memory for a useful KV cache
    │   └── EngineDeadError                 the engine process, or one of its ranks, is gone
    └── StoreError                          the store cannot do what was asked
        ├── CapacityError                   too small for one chunk, or no room on the device
        ├── StorePermissionError            the operating system said no
        ├── FormatVersionError              written by a newer Headwater
        ├── SettingsMismatchError           the store exists with other settings than the URL asks for
        ├── SpecMismatchError               the store holds these weights with another spec
        ├── StoreDamagedError               unreadable, and in use by others, so it cannot be replaced
        ├── BackendError                    a remote store cannot be reached, refuses, or answers nonsense
        │   └── PeerError                   another host's pool cannot be reached, or answers late
        │       ├── PeerRefusedError        it said no, and why
        │       ├── PeerTimeoutError        it did not answer, or took nothing, until the deadline
        │       ├── PeerGoneError           the connection ended
        │       └── WireError               what came is no frame of ours, or out of bounds
        ├── DeadlineError                   opening or administration took longer than its deadline
        └── StoreClosedError                used after close
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """Base of everything Headwater raises on purpose."""


class InvalidArgumentError(HeadwaterError, ValueError):
    """An argument is wrong; the message says what was expected."""


class SpecError(InvalidArgumentError):
    """The spec describes no possible KV."""


class IdentityError(InvalidArgumentError):
    """The weights cannot be named with certainty."""


class WeightsChangedError(IdentityError):
    """Files of the checkpoint changed while it was loaded or read; a new start names them."""


class TopologyError(InvalidArgumentError):
    """The parallel layout cannot exist for this spec."""


class TokenError(InvalidArgumentError):
    """Token ids or extras that cannot be hashed."""


class BufferMismatchError(InvalidArgumentError):
    """A caller's buffer has the wrong size, strides or rights."""


class UrlError(InvalidArgumentError):
    """A store URL that cannot be understood."""


class ConfigError(InvalidArgumentError):
    """A configuration file or variable that cannot be used; the message says which entry, and what is possible."""


class ModelError(InvalidArgumentError):
    """A checkpoint or config that this engine cannot run."""


class EngineConfigError(InvalidArgumentError):
    """Settings that do not go together, or do not fit this machine."""


class RequestError(InvalidArgumentError):
    """One request asks for what the engine cannot give; `param` names the parameter at fault, if one is."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineError(HeadwaterError):
    """The engine itself failed."""


class MemoryBudgetError(EngineError):
    """Too little memory for a useful KV cache; the message has the arithmetic."""


class EngineDeadError(EngineError):
    """The engine process, or one of its ranks, is gone."""


class StoreError(HeadwaterError):
    """The store cannot do what was asked."""


class CapacityError(StoreError):
    """The store is too small for one chunk, or its device has no room."""


class StorePermissionError(StoreError):
    """The operating system refused access."""


class FormatVersionError(StoreError):
    """The store was written by a newer Headwater."""


class SettingsMismatchError(StoreError):
    """The store exists with other settings than the URL asks for."""


class SpecMismatchError(StoreError):
    """The store holds KV of these weights under another spec."""


class StoreDamagedError(StoreError):
    """The store is unreadable and in use by others, so it cannot be replaced."""


class BackendError(StoreError):
    """A remote store cannot be reached, refuses, or answers nonsense."""


class PeerError(BackendError):
    """Another host's pool cannot be reached, or does not answer in time."""


class PeerRefusedError(PeerError):
    """The other side refused: another version, secret, model or tenant secret. `code` says which."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class PeerTimeoutError(PeerError):
    """A deadline passed. A frame may be half sent or half received, so the connection is of no use any more."""


class PeerGoneError(PeerError):
    """The other side closed the connection, or the network did."""


class WireError(PeerError):
    """Bytes that are no frame of Headwater's, or a frame that is out of bounds. The connection is closed."""


class DeadlineError(StoreError):
    """Opening or administration took longer than its deadline."""


class StoreClosedError(StoreError):
    """The store was used after it was closed."""
