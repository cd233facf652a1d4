"""The host that a store is on: which one it is."""

from __future__ import annotations


def boot_id() -> int:
    """A number that differs between hosts, and on one host between two boots; 0 where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return int(file.read().replace("-", "")[:15], 16)
    except (OSError, ValueError):
        return 0
