"""Settings every test runs under."""

import os
import shutil
import signal

from hypothesis import HealthCheck, settings

# Tests share few cores with the servers they start: threads that wait must not spin. Before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if shutil.which("nvidia-smi") is None:
    # Without a GPU the kernels run in Triton's interpreter. It must be chosen before the first import of a
    # kernel, which may come from any test file, so it is chosen here; the engine's own CPU path runs the
    # kernels' references and does not notice.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts the tests in the background has SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "minisgl", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("minisgl")
