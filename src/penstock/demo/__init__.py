"""The demo: a local shop, the pipeline that scrapes it, the terminal display and the command."""
