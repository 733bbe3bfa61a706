import pytest
from support.on_gpu import exact_kernels


@pytest.fixture
def exact():
    """Kernels that repeat themselves."""
    with exact_kernels():
        yield


@pytest.fixture
def at_home_on_host(monkeypatch):
    """Chunks move, however small the model is; kernels that are loaded lazily are not memory of others."""
    monkeypatch.setattr("hf_patrickstar.setup.homes.UNMEASURED_SHARE", 0.0)
    monkeypatch.setattr("hf_patrickstar.memory.meters.used_nbytes", lambda device: lambda: 0)
