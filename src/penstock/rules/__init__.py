"""Pure decisions: values in, values out. No asyncio, clock, randomness, sockets or logging in here
(a test says so).
"""
