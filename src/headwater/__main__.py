"""`python -m headwater`: the command, where it is not on the path."""

from __future__ import annotations

from headwater.cli import main

if __name__ == "__main__":
    main()
