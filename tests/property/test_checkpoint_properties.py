"""Random files and training states: the same bits whoever reads them, however they were spread over processes."""

import itertools
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint_files import make_deferred, same_bits, write_training_state

from hf_patrickstar.checkpoint.deferred import Reader
from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from hf_patrickstar.checkpoint.training_state import SavedState

fast = settings(deadline=None, max_examples=100, database=None, derandomize=True)

DTYPES = list(safetensors.torch._TYPES.values())
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=6).filter(
    lambda name: name != "__metadata__"
)


def random_values(shape, dtype, seed):
    """Any bits; of a bool, 0 or 1."""
    numel = torch.Size(shape).numel()
    limit = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, limit, (numel * dtype.itemsize,), generator=generator).to(torch.uint8)
    return bits.view(dtype).view(shape)


@st.composite
def tensors(draw, dtypes=DTYPES, shapes=SHAPES):
    return random_values(draw(shapes), draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**32)))


@st.composite
def ranges(draw, numel):
    start, stop = sorted((draw(st.integers(0, numel)), draw(st.integers(0, numel))))
    return start, stop


@fast
@given(st.dictionaries(NAMES, tensors(), max_size=6), st.integers(1, 30), st.data())
def test_the_library_reads_our_files_we_read_its_and_any_range_is_the_slice(found, piece_numel, data):
    deferred = data.draw(st.sets(st.sampled_from(sorted(found)))) if found else set()
    ours = {name: make_deferred(value)[0] if name in deferred else value for name, value in found.items()}
    with tempfile.TemporaryDirectory() as folder:
        path, other = Path(folder, "ours"), Path(folder, "theirs")
        order = data.draw(st.permutations(sorted(found)))
        write_safetensors(path, {name: ours[name] for name in order}, {"a": "b"}, piece_numel=piece_numel)
        safetensors.torch.save_file(found, other, {"a": "b"})
        theirs = safetensors.torch.load_file(path)
        assert theirs.keys() == found.keys()
        for file in (SafetensorsFile(path), SafetensorsFile(other)):
            assert file.metadata() == {"a": "b"}
            assert set(file.keys()) == set(found)
            for name, value in found.items():
                start, stop = data.draw(ranges(value.numel()))
                expected = value.reshape(-1)[start:stop]
                assert file.entries[name][:2] == (value.dtype, tuple(value.shape))
                assert same_bits(theirs[name], value)
                assert same_bits(Reader().read(file.get_tensor(name), start, stop), expected)
                into = random_values((stop - start,), value.dtype, 0)
                Reader().fill(into, file.get_tensor(name), start, piece_numel)
                assert same_bits(into, expected)


@st.composite
def boundaries(draw, numel, count):
    """Where the parts of ``count`` processes begin and end; some may be empty."""
    inner = sorted(draw(st.integers(0, numel)) for _ in range(count - 1))
    return [0, *inner, numel]


def is_spread(bounds):
    return sum(stop > start for start, stop in itertools.pairwise(bounds)) > 1


@st.composite
def training_states(draw):
    """States of some parameters, the processes that save them, and how those that are large enough are spread."""
    world_size = draw(st.integers(1, 5))
    states, spread = {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=2).map(tuple))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        keys = draw(st.sets(st.sampled_from(["exp_avg", "exp_avg_sq", "master"]), min_size=1))
        state = {key: random_values(shape, dtype, draw(st.integers(0, 2**32))) for key in sorted(keys)}
        states[name := f"layer.{number}"] = {**state, "step": torch.tensor(float(number))}
        bounds = draw(boundaries(torch.Size(shape).numel(), world_size))
        if is_spread(bounds) and draw(st.booleans()):
            spread[name] = bounds
    return world_size, states, spread


@fast
@given(training_states(), st.integers(1, 5), st.data())
def test_what_some_processes_saved_any_others_read(saved_by, readers, data):
    world_size, states, spread = saved_by
    with tempfile.TemporaryDirectory() as folder:
        saved = SavedState(write_training_state(Path(folder), states, world_size, spread))
        for name, state in states.items():
            assert saved.states[name].keys() == set(state)
            for part in itertools.pairwise(data.draw(boundaries(torch.Size(saved.shapes[name]).numel(), readers))):
                saved.check_complete(name, *part)
            for key, value in state.items():
                tensor = saved.states[name][key]
                assert tensor.shape == value.shape
                flat = value.reshape(-1)
                parts = list(itertools.pairwise(data.draw(boundaries(flat.numel(), readers))))
                assert same_bits(torch.cat([Reader().read(tensor, *part) for part in parts]), flat)
                home = random_values((flat.numel(),), value.dtype, 0)
                other = torch.full((flat.numel(),), -1.0, dtype=torch.float64)
                for start, stop in parts:
                    Reader().fill(home[start:stop], tensor, start)
                    Reader().fill(other[start:stop], tensor, start)
                assert same_bits(home, flat)
                assert torch.equal(other.nan_to_num(), flat.double().nan_to_num())
