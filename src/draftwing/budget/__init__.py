"""How much to draft, from measured costs and observed acceptance."""
