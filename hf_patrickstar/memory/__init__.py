"""HOW MANY bytes: tiers and budgets, the ledger, the payload pool, transfers. The only place that allocates chunks."""
