"""WHEN and WHO: which chunk leaves, where each chunk is at home. Pure decisions over integers, no torch."""
