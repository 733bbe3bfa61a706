"""HOW MANY bytes: tiers and budgets, the ledger, the payload pool, streams. The only place that allocates chunks."""
