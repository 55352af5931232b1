"""Claims on URLs, slots of hosts and cached robots.txt, which all workers of a fleet share."""
