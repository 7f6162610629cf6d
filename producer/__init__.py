"""Producers: prompts, engines, rewards, evaluation, and the service that runs one replica.

A process that an engine spawns imports this package before anything else of ours or of the engine's: from here on it
ends with the service that owns the engine, also while it still starts.
"""

from producer.engine.ownership import end_with_owner

end_with_owner()
