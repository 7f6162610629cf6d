"""Takes planned groups, trains the policy with ColossalAI, publishes each version."""
