"""`python -m headwater.cli`: the same as the `headwater` command."""

from __future__ import annotations

from headwater.cli import main

if __name__ == "__main__":
    main()
