"""Something goes wrong on one rank: every rank learns of it, and none is left waiting."""
