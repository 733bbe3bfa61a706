"""From events to summaries."""
