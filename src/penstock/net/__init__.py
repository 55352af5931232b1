"""Everything that dials out, and the guard it has to pass. Decisions about pages live in rules/ and
fetching/.
"""
