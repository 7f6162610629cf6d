"""Communicators: how the bytes of a policy travel from the publisher to the receivers."""
