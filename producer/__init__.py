"""Answers prompts with the newest policy it has proved, scores the answers, pushes scored groups."""
