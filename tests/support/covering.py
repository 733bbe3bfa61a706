"""Few cases out of a full product: each value of a parameter meets each value of every other one."""

import itertools


def pairwise(**parameters):
    """Rows, as dictionaries, in which each pair of values of two parameters occurs."""
    names = list(parameters)
    products = [dict(zip(names, values, strict=True)) for values in itertools.product(*parameters.values())]
    pairs = [set(itertools.combinations(row.items(), 2)) for row in products]
    rows, missing = [], set().union(*pairs)
    while missing:
        best = max(range(len(products)), key=lambda place: len(pairs[place] & missing))
        rows.append(products[best])
        missing -= pairs[best]
    return rows


def ids(row):
    """A name for a row."""
    return "-".join(f"{key}={value}" for key, value in row.items())
