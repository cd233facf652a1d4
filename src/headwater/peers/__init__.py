"""KV between hosts: a push writes canonical tiles into another host's pool, layer group by layer group."""
