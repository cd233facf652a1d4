"""What the commands under `headwater bench` measure: always against a limit or a peer, in the same run."""
