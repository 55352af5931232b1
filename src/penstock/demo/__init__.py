"""The demo: a shop of our own, the pipeline that scrapes it, the terminal display, and the command
that ties them together.
"""
