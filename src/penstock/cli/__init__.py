"""The command line: one module per group of commands, each thin over the stores. No behaviour of the pipeline lives here."""
