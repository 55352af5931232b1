"""Pure decisions: functions of values, without asyncio, clock, randomness, sockets or logging.

A test checks the imports of this package.
"""
