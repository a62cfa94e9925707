import os
from importlib.metadata import version


# The plugin of the GPU path would look for a GPU. Most of the time of the tests is compilation:
# leave out what makes programs fast. (Later versions of XLA do not know the last flag.) Some tests
# take several devices, which have to be there when JAX starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jax").startswith("0.10.") else ""),
)

import jax
import pytest
from jaxtyping import config


jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def no_type_checks(monkeypatch):
    """Users run without beartype: their mistakes reach linrec's own checks."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True, scope="module")
def clear_caches():
    """Compiled programs are large, and no other file runs them again."""
    yield
    jax.clear_caches()
