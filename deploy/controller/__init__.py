"""The controller: a FastAPI service without state of its own."""
