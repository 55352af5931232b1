"""Real servers for development and tests, each a private instance on loopback with its data in this
clone. Nothing here is part of the product.
"""
