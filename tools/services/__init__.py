"""Real servers for development and tests. Not part of the product.

Each server is a private instance on loopback, with its data in this clone.
"""
