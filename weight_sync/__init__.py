"""Versions, manifests, communicators, publisher, receiver and the proof of what a replica runs."""
