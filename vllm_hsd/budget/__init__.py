"""How much is drafted, and by which levels: survival, costs, choice."""
