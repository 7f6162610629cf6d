"""Rewards: a score, unscorable, or failed; never 0 for a failure."""
