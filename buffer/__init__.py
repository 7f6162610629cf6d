"""What producers and consumers share, in Redis: the prompt ledger, groups, plans, members, metrics. No torch, no vLLM."""
