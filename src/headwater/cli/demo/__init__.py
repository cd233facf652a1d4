"""The pool at work, twice.

`headwater demo` (`command`, `two_servers`): two real servers share what they compute. `live` is such a server as a
process, `document` what they are asked about, `stand_in` the model where no real one is installed.

`headwater pool demo` (`run`, `show`): one server's ranks write KV, two others of different shapes read it, and every
byte is compared. Read `ranks` first: it is what an engine does with the pool. `cache` is the engine's side (a model
and its paged cache), and `servers` starts the processes.
"""
