"""Entries of the table in ``drafters.kinds``, a file per family; each imports what it needs when it is used."""
