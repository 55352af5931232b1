"""The configuration: schema of all options, files, units."""
