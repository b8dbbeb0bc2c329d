"""How trees grow: what is asked for, which tokens follow a node, static trees, and what a node is worth."""
