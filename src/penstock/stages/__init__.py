"""Stages: fetch, extract and what runs inside them. Importing this package imports none of them."""
