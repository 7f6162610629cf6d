"""Pools: how replicas of a service are started, counted and stopped."""
