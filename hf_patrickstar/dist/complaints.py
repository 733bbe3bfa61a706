"""What the collectives say when one of them has failed."""


def complain(what: str, rank: int, world_size: int, finding: str, error: Exception) -> str:
    """The message of a collective that failed.

    Args:
        what: What the collective was for.
        rank: This rank.
        world_size: The number of processes.
        finding: What is known of the other ranks, in sentences.
        error: What torch said.
    """
    parts = [
        f"{what}: a collective failed on rank {rank} of {world_size}.",
        finding,
        "Look first at the error of the rank that is missing; if it was only slow, raise the timeout of the process "
        "group (ddp_timeout in the training arguments). Then restart from the last checkpoint.",
        f"torch.distributed says: {error}",
    ]
    return " ".join(part for part in parts if part)
