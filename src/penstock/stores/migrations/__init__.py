"""Migrations of a store, one file for each version number."""
