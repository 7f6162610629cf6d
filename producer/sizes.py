"""What one group may take of the buffer is bounded by the spec alone, before anything is generated."""

BYTES_PER_TOKEN = 12  # id, log-prob, version
TEXT_BYTES_PER_TOKEN = 16
RECORD_BYTES = 1024


def group_bytes(*, group_size: int, prompt_tokens: int, completion_tokens: int) -> int:
    """Upper bound of the bytes of one group, which its lease reserves in the buffer's budget."""
    completion = completion_tokens * (BYTES_PER_TOKEN + TEXT_BYTES_PER_TOKEN) + RECORD_BYTES
    return group_size * completion + prompt_tokens * 4 + RECORD_BYTES
