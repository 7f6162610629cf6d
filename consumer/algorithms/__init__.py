"""Algorithms: advantages and losses, each one readable function."""
