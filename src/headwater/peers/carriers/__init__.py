"""How bytes travel between hosts. `tcp` needs nothing installed; one-sided carriers can stand beside it."""
