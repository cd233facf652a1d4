"""Other people's engines: thin adapters over `headwater.connector`, one package each."""
