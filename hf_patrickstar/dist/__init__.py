"""Processes that train one model together: collectives, their order, messages, and the watch over them."""
