"""Mistakes that a person makes, as a table with the parts that each error must say."""
