"""The work behind operators' commands."""
