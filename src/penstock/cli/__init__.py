"""The command line: one module per group of commands. Pipelines are run by other packages."""
