"""The search decides as one that packs every candidate, tensor by tensor, into a layout."""

from hypothesis import given, settings
from hypothesis import strategies as st
from property import reference_search
from unit.spec_builders import BF16, FP32, make_modules

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.layout.packing import pack
from hf_patrickstar.layout.search import search_layout
from hf_patrickstar.layout.specs import TensorSpec

fast = settings(deadline=None, max_examples=150, database=None, derandomize=True)
numels = st.integers(0, 3000) | st.sampled_from([0, 64, 128, 640, 5000])


@st.composite
def models(draw):
    """Tensors of several kinds, often a layer repeated, and modules that own any of them."""
    layer = draw(st.lists(st.tuples(numels, st.booleans(), st.integers(-1, 1), st.booleans()), min_size=1, max_size=6))
    rest = draw(st.lists(st.tuples(numels, st.booleans(), st.integers(-1, 1), st.booleans()), max_size=6))
    tensors = [
        TensorSpec(index, f"t{index}", (numel,), trainable, optimizer_index=number, types=BF16 if is_mixed else FP32)
        for index, (numel, trainable, number, is_mixed) in enumerate(layer * draw(st.integers(1, 6)) + rest)
    ]
    indices = st.integers(0, len(tensors) - 1)
    modules = make_modules(*draw(st.lists(st.frozensets(indices, max_size=5).map(sorted), max_size=12)))
    world_size = draw(st.integers(1, 4))
    on_host = draw(st.frozensets(indices, max_size=2)) if world_size == 1 else frozenset()
    return tensors, modules, on_host, world_size


def exposed_ns(num_chunks, chunk_numel):
    """Some chunks are the fastest, neither the smallest nor the largest."""
    return 300 * num_chunks + chunk_numel


def outcome(search, *given_, **arguments):
    """What a search has found, or its error: ``ValueError`` where no module could be named as the one without room."""
    try:
        return search(*given_, **arguments)
    except (BudgetError, ValueError) as error:
        return type(error), str(error)


@st.composite
def searches(draw):
    tensors, modules, on_host, world_size = draw(models())
    staged = draw(st.sampled_from([0, 1, 3]))
    arguments = {
        "on_host": on_host,
        "world_size": world_size,
        "splits": draw(st.booleans()),
        "staging_nbytes": lambda numel, dtype: staged * numel + (dtype == "float32"),
        "exposed_ns": draw(st.sampled_from([None, exposed_ns])),
    }
    budget = draw(st.none() | st.integers(0, 4 * sum(spec.nbytes for spec in tensors) + 1000))
    return (tensors, modules, budget), arguments


@fast
@given(searches())
def test_a_search_decides_as_one_that_packs_every_candidate(case):
    given_, arguments = case
    assert outcome(search_layout, *given_, **arguments) == outcome(reference_search.search_layout, *given_, **arguments)


@fast
@given(models(), st.integers(1, 6000), st.booleans())
def test_a_layout_is_that_of_packing_tensor_by_tensor(model, chunk_numel, splits):
    tensors, _, on_host, world_size = model
    given_ = (tensors, chunk_numel, on_host, world_size, splits)
    assert pack(*given_) == reference_search.pack(*given_)
