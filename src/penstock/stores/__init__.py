"""Transactional domains that several adapters may share."""
