"""What producers and consumers share, in Redis: the ledger, groups, plans, members, metrics. No torch, no vLLM."""
