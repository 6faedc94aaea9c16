"""The mark of tests that need sandboxes. A skip names what the kernel lacks."""

import pytest

from symphony.launcher.sandbox.probe import probe

LACKING = probe()
assert LACKING is None or "its first process is ended" not in LACKING, "a sandbox failed, and named nothing lacking"

needs_sandbox = pytest.mark.skipif(LACKING is not None, reason=f"NO SANDBOX TESTED: {LACKING}")
