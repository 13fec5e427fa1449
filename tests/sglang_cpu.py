"""Where the real SGLang is and how it is started on a CPU: `make test-sglang` installs it and says where."""

import os
from pathlib import Path

import pytest

PYTHON = os.environ.get("EAGLET_SGLANG_PYTHON", "")
ARGUMENTS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "disable-overlap-schedule": True,
    "grammar-backend": "none",
    "max-total-tokens": 8192,
    "max-running-requests": 4,
}
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
}
MARKS = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        not Path(PYTHON).is_file(),
        reason=f"SGLang is not installed: EAGLET_SGLANG_PYTHON is {PYTHON or 'not set'}; `make test-sglang` installs it",
    ),
    pytest.mark.timeout(2400),
]
