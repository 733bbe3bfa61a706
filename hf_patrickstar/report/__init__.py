"""From counts to summaries."""
