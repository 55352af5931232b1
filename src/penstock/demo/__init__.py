"""The demo: a shop of our own, the pipeline that scrapes it and the terminal display. The command that ties them together lives in cli/."""
