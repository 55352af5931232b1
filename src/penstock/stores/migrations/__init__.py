"""Migrations of an SQL store: one file `mNNNN_name.py` per store version, and their runner."""
