"""What is decided before anything is allocated, and the allocation."""
