"""Fetches pages politely: slots, robots.txt, proxies."""
