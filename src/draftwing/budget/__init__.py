"""How much to draft, from observed costs and acceptance."""
