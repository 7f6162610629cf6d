"""Engines: what turns prompts into completions with log-probs, and takes new weights."""
